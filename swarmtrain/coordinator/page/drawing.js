// Drawings as SVG: bars of parts, and the pipeline. Everything is text or a shape; nothing is fetched.
const SVG = "http://www.w3.org/2000/svg";
const MAX_SHOWN = 8; // peers of a stage that are drawn; the table has the others

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

export function size(svg) {
  const box = svg.getBoundingClientRect();
  return [Math.max(240, box.width), Math.max(20, box.height)];
}

export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function drawBar(svg, words, parts, unit) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  const [width, height] = size(svg);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  words.replaceChildren();
  if (!(total > 0)) { words.textContent = "nothing measured yet"; return; }
  let at = 0;
  for (const [name, value] of parts) {
    const share = value / total;
    svg.append(element("rect", { x: at * width, y: 0, width: Math.max(0, share * width - 1), height, class: `part ${name}` }));
    at += share;
    const item = document.createElement("span"), key = document.createElement("span");
    key.className = `key ${name}`;
    item.append(key, `${name} ${unit ? `${value.toFixed(2)} s, ` : ""}${(100 * share).toFixed(0)} %`);
    words.append(item);
  }
  svg.setAttribute("aria-label", parts.map(([name, value]) => `${name} ${((100 * value) / total).toFixed(0)} percent`).join(", "));
}

export function drawPipeline(svg, status) {
  const stages = status.stages, tall = Math.max(1, ...stages.map((peers) => Math.min(MAX_SHOWN + 1, peers.length)));
  const column = 176, box = [132, 40], gap = 54, top = 34;
  const width = 20 + stages.length * column, height = top + tall * gap + 6;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.width = `${width}px`;
  svg.style.maxWidth = "none";
  svg.replaceChildren();
  const ways = element("g"), boxes = element("g"), places = new Map();
  stages.forEach((peers, stage) => {
    const x = 14 + stage * column;
    const serving = peers.filter((peer) => peer.state === "serving").length;
    boxes.append(element("text", { x, y: 18, class: "title" }, `Stage ${stage}`));
    boxes.append(element("text", { x: x + box[0], y: 18, class: "small", "text-anchor": "end" }, `${serving} serving`));
    if (peers.length === 0) {
      boxes.append(element("rect", { x, y: top, width: box[0], height: box[1], rx: 7, class: "nobody" }));
      boxes.append(element("text", { x: x + box[0] / 2, y: top + 25, class: "alarm", "text-anchor": "middle" }, "nobody"));
    }
    peers.slice(0, MAX_SHOWN).forEach((peer, i) => {
      const y = top + i * gap;
      places.set(peer.peer, [x, y + box[1] / 2]);
      boxes.append(element("rect", { x, y, width: box[0], height: box[1], rx: 7, class: `peer ${peer.doubt ? "doubt" : peer.state}` }));
      boxes.append(element("text", { x: x + 9, y: y + 17, class: "text" }, (peer.name || peer.peer.slice(-8)).slice(0, 16)));
      boxes.append(element("text", { x: x + 9, y: y + 32, class: peer.doubt ? "alarm" : "small" },
        peer.doubt ? "link broken" : peer.state === "serving" ? busy(peer) : peer.state));
    });
    if (peers.length > MAX_SHOWN)
      boxes.append(element("text", { x: x + 9, y: top + MAX_SHOWN * gap + 14, class: "small" }, `and ${peers.length - MAX_SHOWN} more`));
  });
  for (const way of status.routes) {
    const from = places.get(way.from), to = places.get(way.to);
    if (!from || !to) continue;
    const [x1, y1] = [from[0] + box[0] + 1, from[1]], [x2, y2] = [to[0] - 1, to[1]], middle = (x1 + x2) / 2;
    const load = way.share < 0.2 ? "low" : way.share < 0.5 ? "middle" : "high";
    ways.append(element("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, class: `way ${load}`,
      "stroke-width": (1 + 5 * way.share).toFixed(1) }));
  }
  svg.append(ways, boxes);
  svg.setAttribute("aria-label", "Pipeline: " + stages.map((peers, i) =>
    `stage ${i}: ${peers.length ? peers.map((peer) => `${peer.name || peer.peer.slice(-8)} ${peer.doubt ? "link broken" : peer.state}`).join(", ") : "nobody"}`).join("; "));
}

function busy(peer) { // in the last minute
  return "compute" in peer.lately ? `${(100 * peer.lately.compute).toFixed(0)} % computing` : "serving";
}
