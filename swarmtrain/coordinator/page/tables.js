// Tables and lists of the page: peers, contributors, checkpoints. Text only: nothing that a peer says becomes markup.
import { short } from "./drawing.js";

const MAX_ROWS = 200;

function fill(body, rows) {
  body.replaceChildren(...rows.slice(0, MAX_ROWS).map(({ cells, head = 0, isDoubted = false }) => {
    const row = document.createElement("tr");
    if (isDoubted) row.className = "doubted";
    row.append(...cells.map((text, i) => {
      const cell = document.createElement(i === head ? "th" : "td");
      if (i === head) cell.scope = "row";
      cell.textContent = text;
      return cell;
    }));
    return row;
  }));
}

function called(item) {
  return item.name ? `${item.name} (${item.peer.slice(-8)})` : item.peer.slice(-8);
}

export function showPeers(body, status) {
  fill(body, status.stages.flat().map((peer) => ({ isDoubted: Boolean(peer.doubt), cells: [
    called(peer), String(peer.stage), peer.doubt ? `${peer.state}, link broken` : peer.state,
    `${peer.silent_s.toFixed(0)} s ago`, String(peer.microbatches),
    peer.forward_ms ? `${(peer.forward_ms + peer.backward_ms).toFixed(1)} ms` : "–"] })));
}

export function showContributors(body, status) {
  fill(body, status.contributors.map((item) => ({ head: 1, cells: [
    String(item.rank), called(item), item.microbatches.toLocaleString("en"), short(item.tokens),
    (item.seconds / 3600).toFixed(item.seconds < 3600 ? 3 : item.seconds < 36000 ? 2 : 0), `${(100 * item.share).toPrecision(3)} %`,
    item.here ? "here" : "has left"] })));
}

export function showCheckpoints(place, checkpoints, isPublic) {
  if (checkpoints.length === 0) return;
  place.replaceChildren(...checkpoints.map((checkpoint) => {
    const item = document.createElement("div"), title = document.createElement("h3");
    item.className = "checkpoint";
    title.textContent = `Step ${checkpoint.step}`;
    item.append(title);
    if (checkpoint.sample) {
      const quote = document.createElement("blockquote");
      quote.textContent = checkpoint.sample;
      item.append(quote);
    }
    const files = document.createElement("details"), summary = document.createElement("summary");
    summary.textContent = `${checkpoint.files.length} files, ${size(checkpoint.files)}, with SHA-256`;
    files.append(summary, ...checkpoint.files.map((file) => line(checkpoint, file, isPublic)));
    item.append(files);
    return item;
  }));
}

function line(checkpoint, file, isPublic) {
  const row = document.createElement("div"), name = document.createElement(isPublic ? "span" : "a");
  name.textContent = file.name;
  if (!isPublic) name.href = `checkpoint?step=${checkpoint.step}&file=${encodeURIComponent(file.name)}`;
  const digest = document.createElement("code");
  digest.textContent = file.sha256 || "it has a digest of itself";
  row.append(name, ` ${size([file])} `, digest);
  return row;
}

function size(files) {
  const bytes = files.reduce((sum, file) => sum + file.bytes, 0);
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${Math.ceil(bytes / 1e3)} kB`;
}
