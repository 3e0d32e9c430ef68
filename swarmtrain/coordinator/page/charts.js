// Charts by step: round ticks, and what a point says under the pointer or the arrow keys.
import { element, short, size } from "./drawing.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 12, 8, 22];
const charts = new WeakMap(); // by svg: what is drawn, and which point is looked at

export function roundTicks(low, high, count) { // 1, 2 or 5 times a power of ten apart
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return { ticks: Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step), decimals };
}

function label(value, decimals) {
  return Math.abs(value) >= 1e4 ? short(value) : value.toFixed(Math.min(8, decimals));
}

export function drawCurve(svg, out, points, pick, dots, describe, say) {
  const [width, height] = size(svg);
  const known = points.filter((point) => pick(point) !== null && pick(point) !== undefined);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  if (known.length === 0) {
    svg.append(element("text", { x: width / 2, y: height / 2, class: "label", "text-anchor": "middle" }, "no step yet"));
    return;
  }
  const marked = dots ? points.filter((point) => dots(point) !== null) : [];
  const values = [...known.map(pick), ...marked.map((point) => dots(point))];
  let low = Math.min(...values), high = Math.max(...values);
  if (high === low) { high += 1; low -= low > 0 ? Math.min(1, low) : 1; }
  const first = known[0].step, last = known[known.length - 1].step;
  const x = (step) => LEFT + ((step - first) / Math.max(1, last - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (height - TOP - BOTTOM);
  const rows = roundTicks(low, high, 4);
  for (const value of rows.ticks) {
    svg.append(element("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "axis" }));
    svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, class: "label", "text-anchor": "end" }, label(value, rows.decimals)));
  }
  const columns = last > first ? roundTicks(first, last, Math.max(3, Math.floor(width / 120))).ticks : [first];
  for (const step of columns.filter(Number.isInteger))
    svg.append(element("text", { x: x(step), y: height - 6, class: "label tick", "text-anchor": "middle" }, String(step)));
  const path = known.map((point, i) => `${i ? "L" : "M"}${x(point.step).toFixed(1)} ${y(pick(point)).toFixed(1)}`).join("");
  svg.append(element("path", { d: path, class: "line" }));
  if (known.length === 1) svg.append(element("circle", { cx: x(first), cy: y(pick(known[0])), r: 3, class: "dot" }));
  for (const point of marked) svg.append(element("circle", { cx: x(point.step), cy: y(dots(point)), r: 3.5, class: "dot" }));
  svg.setAttribute("aria-label", describe(known[0], known[known.length - 1]));
  const before = charts.get(svg);
  charts.set(svg, { known, pick, x, y, out, say, height, step: before ? before.step : null });
  if (!before) listen(svg);
  point(svg);
}

function listen(svg) {
  const look = (step) => { charts.get(svg).step = step; point(svg); };
  svg.addEventListener("pointermove", (event) => {
    const { known, x } = charts.get(svg), at = event.clientX - svg.getBoundingClientRect().left;
    look(known.reduce((best, item) => (Math.abs(x(item.step) - at) < Math.abs(x(best.step) - at) ? item : best)).step);
  });
  svg.addEventListener("pointerleave", () => look(null));
  svg.addEventListener("blur", () => look(null));
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    const { known, step } = charts.get(svg), now = known.findIndex((item) => item.step === step);
    look(known[now < 0 ? known.length - 1 : Math.min(known.length - 1, Math.max(0, now + way))].step);
    event.preventDefault();
  });
}

function point(svg) { // the point that is looked at, if there still is one
  const { known, pick, x, y, out, say, height, step } = charts.get(svg);
  svg.querySelectorAll(".cursor, .mark").forEach((item) => item.remove());
  const item = known.find((candidate) => candidate.step === step);
  out.textContent = item ? say(item) : "";
  if (!item) return;
  svg.append(element("line", { x1: x(step), x2: x(step), y1: TOP, y2: height - BOTTOM, class: "cursor" }));
  svg.append(element("circle", { cx: x(step), cy: y(pick(item)), r: 4, class: "mark" }));
}
