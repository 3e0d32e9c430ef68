// The volunteer's page: asks the peer every two seconds, and posts what its owner wants.

const LOOK_MS = 2000;
const FIELDS = ["hours", "only_when_idle", "max_up", "max_down", "max_traffic"];
const item = (name) => document.getElementById(name);
let shown = {};  // what the fields held when they were filled last

function say(name, text) {
  if (item(name).textContent !== text) item(name).textContent = text;
}

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 999.5 || unit === "TB") return `${Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
}

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit" });
}

function show(peer) {
  const isWorking = peer.cause === "working" || peer.state === "serving";
  say("name", peer.name || "Your peer");
  say("run", peer.run_name ? `stage ${peer.stage} of ${peer.run_name}` : "");
  say("state", peer.cause === "working" ? "working" : peer.state);
  item("state").className = `badge ${isWorking ? "good" : "warn"}`;
  const ends = peer.courtesy && peer.courtesy.pause && peer.courtesy.pause.ends_at;
  say("why", (peer.reason || "") + (ends ? ` (until ${clock(ends)})` : ""));
  say("next", peer.next ? `Next: ${peer.next}` : "");
  const isAsked = peer.cause === "paused";
  item("pause").disabled = isAsked || !["serving", "paused"].includes(peer.state);
  item("resume").disabled = !isAsked;
  if (peer.credit) {
    say("microbatches", peer.credit.microbatches.toLocaleString());
    say("share", `${Number((100 * peer.credit.share).toPrecision(3))} %`);
    say("step", `${peer.step} of ${peer.steps}`);
    say("bytes", `${size(peer.traffic.sent)}, ${size(peer.traffic.received)}`);
    say("memory", size(peer.memory_bytes));
    const month = peer.courtesy.month;
    say("month", month ? `${size(month.bytes)} of ${size(month.limit)}` : "no cap");
  }
  draw(peer.history);
  fill(peer.settings.in_force);
}

function draw(points) {
  const curve = item("curve");
  if (points.length < 2) {
    say("span", "The curve begins after a minute.");
    return;
  }
  const [first, last] = [points[0], points[points.length - 1]];
  const most = Math.max(1, ...points.map((point) => point[1]));
  const place = ([at, count]) =>
    `${(600 * (at - first[0]) / Math.max(1, last[0] - first[0])).toFixed(1)} ${(150 - 140 * count / most).toFixed(1)}`;
  let path = curve.querySelector("path");
  if (!path) path = curve.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  path.setAttribute("d", `M ${points.map(place).join(" L ")}`);
  curve.setAttribute("aria-label", `Microbatches over time: ${first[1]} at ${clock(first[0])}, ${last[1]} at ${clock(last[0])}`);
  say("span", `${clock(first[0])} to ${clock(last[0])}: from ${first[1]} to ${last[1]} microbatches`);
}

function fill(limits) {
  for (const name of FIELDS) {
    const field = item(name), isTouched = name in shown && field.value !== shown[name];
    if (isTouched || document.activeElement === field) continue;
    field.value = shown[name] = limits[name];
  }
}

async function post(what, body) {
  const answer = await fetch(what, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  return answer.ok ? "" : await answer.text();
}

async function look() {
  try {
    const answer = await fetch("api");
    if (!answer.ok) throw new Error(`${answer.status}`);
    show(await answer.json());
  } catch (error) {
    say("state", "not answering");
    item("state").className = "badge bad";
    say("why", "The peer does not run, or has ended. This page tries again.");
  }
}

for (const what of ["pause", "resume"]) {
  item(what).addEventListener("click", async () => {
    item(what).disabled = true;
    say("asked", await post(what, {}));
    await look();
  });
}

item("limits").addEventListener("submit", async (event) => {
  event.preventDefault();
  const wanted = Object.fromEntries(FIELDS.filter((name) => item(name).value !== shown[name])
    .map((name) => [name, item(name).value.trim()]));
  const problem = await post("change", wanted);
  item("saved").className = problem ? "bad" : "";
  say("saved", problem || "Saved.");
  if (!problem) shown = {};
  await look();
});

await look();
setInterval(look, LOOK_MS);
