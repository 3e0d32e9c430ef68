// The status page: one live connection, one snapshot, drawn. It only reads.
import { drawCurve } from "./charts.js";
import { drawBar, drawPipeline, short } from "./drawing.js";
import { showCheckpoints, showContributors, showPeers } from "./tables.js";

const $ = (id) => document.getElementById(id);
const MAX_EVENTS = 60, SAMPLE_S = 30;
const WORTH_TELLING = 0.05; // of a step
const TONES = { training: "good", complete: "good", waiting: "warn", starting: "warn" };
const LOUD = { peer_lost: "bad", peer_doubted: "bad", peer_diverged: "bad", peer_excluded: "bad", run_rolled_back: "bad", run_waits: "warn",
  prepare_failed: "warn", checkpoint_failed: "bad", work_replayed: "warn" };
const PARTS = ["compute", "reduce", "queue", "wire", "idle"];
let points = [], status = null, isConnected = false, isDrawn = true, filesShown = "";

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.ceil(seconds)} s`;
}

function showState() {
  const word = isConnected && status ? status.state : "connecting";
  $("state-word").textContent = isConnected || !status ? word : "no connection";
  $("state-word").className = `badge ${isConnected ? TONES[word] || "warn" : "bad"}`;
  if (!isConnected && status) {
    $("state-why").textContent = `The coordinator does not answer since ${clock(status.now)}; trying again.`;
  } else if (status) {
    const reason = status.reason ? `because ${status.reason}, ` : "";
    $("state-why").textContent = `${reason}since ${clock(status.since)}.${status.next ? ` Next: ${status.next}.` : ""}`;
  }
}

function rate() { // over the last points, so that one slow step does not make it jump
  const some = points.slice(-20).filter((point) => point.tokens_per_s);
  if (some.length === 0) return null;
  return some.length / some.reduce((sum, point) => sum + 1 / point.tokens_per_s, 0);
}

function showNumbers() {
  const last = status.last, peers = status.stages.flat(), speed = rate();
  document.title = `${status.name}: ${status.state}, step ${status.step}`;
  $("name").textContent = status.name;
  $("run").textContent = `run ${status.run}`;
  $("step").textContent = `${status.step} / ${status.steps}`;
  $("loss").textContent = last && last.loss !== null ? last.loss.toFixed(4) : "–";
  $("val-loss").textContent = status.val_loss === null ? "–" : status.val_loss.toFixed(4);
  $("rate").textContent = speed && status.state !== "waiting" ? short(speed) : "–";
  $("tokens").textContent = short(status.tokens);
  $("left").textContent = duration(status.seconds_left ?? NaN);
  $("peers").textContent = `${peers.filter((peer) => peer.state === "serving" && !peer.doubt).length} of ${peers.length}`;
  $("checkpoint").textContent = status.checkpoint_step ? `step ${status.checkpoint_step}` : "–";
}

function showTime() {
  const split = status.split;
  drawBar($("split"), $("split-text"), split ? [["lease", split.lease_s], ["reduce", split.reduce_s], ["apply", split.apply_s]] : [], true);
  const whole = split ? split.lease_s + split.reduce_s + split.apply_s : 0;
  if (split && split.waited_s > WORTH_TELLING * whole) {
    const waits = document.createElement("span");
    waits.className = "sentence";
    waits.textContent = `waits for the all-reduce of stage ${split.slowest_stage}: ${split.waited_s.toFixed(1)} of ${whole.toFixed(1)} s`;
    $("split-text").append(waits);
  }
  drawBar($("spent"), $("spent-text"), PARTS.map((name) => [name, spentLately(name)]), false);
}

function spentLately(name) {
  return status.stages.flat().reduce((sum, peer) => sum + (peer.lately[name] || 0), 0);
}

function showJoin() {
  const serving = status.stages.map((peers) => peers.reduce((sum, peer) => sum + peer.capacity, 0));
  const counts = status.stages.map((peers) => peers.filter((peer) => peer.state === "serving").length);
  const stage = counts.includes(0) ? counts.indexOf(0) : serving.indexOf(Math.min(...serving));
  $("needed").textContent = `stage ${stage}`;
  const get = status.homepage ? `git clone ${status.homepage} swarmtrain && cd swarmtrain && ` : "";
  const install = "pip install --constraint constraints.txt .";
  const text = `${get}${install} && swarmtrain join ${status.is_public ? "INVITE" : status.invite}`;
  if ($("join").textContent !== text) $("join").textContent = text;
  if (status.is_public) {
    $("how").textContent = "Ask the operator for an invite. On a machine with Python 3.11 or newer:";
    $("operators").hidden = true;
  }
}

async function showFiles() { // read again when there is another checkpoint, or soon after: its sample comes later
  const due = `${status.checkpoint_step} ${Math.floor(status.now / SAMPLE_S)}`;
  if (!status.checkpoint_step || due === filesShown) return;
  filesShown = due;
  try {
    const answer = await fetch("api/checkpoints");
    if (answer.ok) showCheckpoints($("checkpoints"), await answer.json(), status.is_public);
  } catch { filesShown = ""; } // the coordinator is away: the state says so
}

function drawCurves() {
  drawCurve($("curve"), $("curve-at"), points, (point) => point.loss, (point) => point.val_loss,
    (first, last) => `Loss from ${first.loss.toFixed(3)} at step ${first.step} to ${last.loss.toFixed(3)} at step ${last.step}`,
    (point) => `step ${point.step}: loss ${point.loss.toFixed(4)}` + (point.val_loss === null ? "" : `, validation ${point.val_loss.toFixed(4)}`));
  drawCurve($("speed"), $("speed-at"), points, (point) => point.tokens_per_s, null,
    (first, last) => `Tokens per second, ${short(last.tokens_per_s)} at step ${last.step}`,
    (point) => `step ${point.step}: ${short(point.tokens_per_s)} tokens/s, ${clock(point.at)}`);
}

function draw() { // at most once per frame, and not while nobody looks
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(() => {
    isDrawn = true;
    showState();
    if (!status) return;
    showNumbers();
    showTime();
    showJoin();
    showPeers($("people"), status);
    showContributors($("given"), status);
    showFiles();
    drawPipeline($("pipeline"), status);
    drawCurves();
  });
}

function happened(event) {
  const item = document.createElement("li"), time = document.createElement("time"), text = document.createElement("span");
  time.textContent = clock(event.at);
  time.dateTime = new Date(event.at * 1000).toISOString();
  text.textContent = event.line;
  text.className = LOUD[event.event] || "";
  item.append(time, text);
  $("events").prepend(item);
  while ($("events").children.length > MAX_EVENTS) $("events").lastElementChild.remove();
}

function listen() {
  const live = new EventSource("api/live");
  live.onopen = () => { isConnected = true; draw(); };
  live.onerror = () => {
    isConnected = false;
    draw();
    if (live.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
  live.addEventListener("status", (message) => { status = JSON.parse(message.data); isConnected = true; draw(); });
  live.addEventListener("curve", (message) => { points = JSON.parse(message.data); draw(); });
  live.addEventListener("points", (message) => { points.push(...JSON.parse(message.data)); thin(); draw(); });
  live.addEventListener("happened", (message) => happened(JSON.parse(message.data)));
}

function thin() { // an open page must not grow for ever either
  if (points.length > 1200) points = points.filter((point, i) => i % 2 === 0 || i === points.length - 1);
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("join").textContent);
    $("copied").textContent = "copied";
  } catch {
    getSelection().selectAllChildren($("join"));
    $("copied").textContent = "selected: copy it with Ctrl-C";
  }
});
addEventListener("resize", draw);
listen();
