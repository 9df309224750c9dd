// The page of the studio: asks for runs, and draws what they tell.

const byId = (id) => document.getElementById(id);
const form = byId("ask");
const numbers = ["heads", "dim", "scale", "seed", "examples", "tokens", "noise", "seconds"];
const tones = { running: "busy", RECOVERED: "good", RECOVERED_ON_SPAN: "good", FITTED: "fair", NOT_IDENTIFIED: "fair", TIME_LIMIT: "fair", stopped: "fair" };
const precise = 1e-10; // a head error below this is shown as found
const lowest = 1e-17; // the foot of the chart and of the bars
const mostRows = 200; // of the table of stages

let about; // what the server allows
let shown; // the run on the page: see watch()

// Words and numbers

const raised = (n) => String(n).replace("-", "⁻").replace(/\d/g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);

function say(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || (value >= 0.01 && value < 1000)) return String(Number(value.toPrecision(2)));
  if (value >= 1000 && value < 1e6) return Number(value.toPrecision(2)).toLocaleString("en");
  const [digits, power] = value.toExponential(1).split("e");
  return `${digits}·10${raised(Number(power))}`;
}

const clock = (s) => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`);
const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "");
const word = (state) => ({ running: "learning", stopped: "stopped", failed: "failed" })[state] ?? state.replaceAll("_", " ");
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function described(wish) {
  const noise = wish.noise > 0 ? `, noise ${wish.noise}` : "";
  return `${plural(wish.heads, "head")}, d = ${wish.dim}, ${wish.tokens} tokens, ${plural(wish.examples, "example")}${noise}`;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The form

function fill(wish) {
  for (const [name, value] of Object.entries(wish)) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  complain("");
  mark();
}

function asked() {
  const wish = { method: form.elements.method.value, inputs: form.elements.inputs.value, count_heads: form.elements.count_heads.checked };
  for (const name of numbers) wish[name] = form.elements[name].value.trim() === "" ? null : Number(form.elements[name].value);
  return wish;
}

function mark() {
  const now = asked();
  for (const button of byId("presets").children) {
    const wish = about.presets[button.textContent];
    button.setAttribute("aria-pressed", String(Object.keys(wish).every((name) => wish[name] === now[name])));
  }
}

function complain(line) {
  byId("problem").textContent = line;
  for (const name of numbers) {
    const at = line.startsWith(`${name} is `) || line.startsWith(`${labelOf(name)} is `);
    form.elements[name].setAttribute("aria-invalid", String(at));
    if (at) form.elements[name].focus();
  }
}

const labelOf = (name) => form.elements[name].labels[0].textContent.trim();

function outOfBounds() {
  const wish = asked();
  for (const name of numbers) {
    const [least, most] = about.bounds[name];
    if (wish[name] === null || !Number.isFinite(wish[name])) return `${labelOf(name)} is not a number: choose from ${least} to ${most}`;
    if (wish[name] < least || wish[name] > most) return `${labelOf(name)} is ${wish[name]}: choose from ${least} to ${most}`;
  }
  return "";
}

async function start(event) {
  event.preventDefault();
  complain(outOfBounds());
  if (byId("problem").textContent) return;
  byId("start").disabled = true;
  try {
    const answer = await post("/runs", asked());
    if (answer.error) return complain(answer.error);
    await list();
    watch(answer);
    if (matchMedia("(max-width: 60rem)").matches) byId("run").scrollIntoView();
  } catch {
    complain("The studio does not answer: is it still running?");
  } finally {
    byId("start").disabled = false;
  }
}

async function post(address, body) {
  const answer = await fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  return answer.json();
}

// The list of runs

async function list() {
  const runs = await (await fetch("/runs")).json();
  byId("no-runs").hidden = runs.length > 0;
  byId("runs").replaceChildren(...runs.map((run) => {
    const how = element("span", { class: `how ${tones[run.state] ?? "bad"}` }, word(run.state));
    const what = element("span", { class: "what" }, `${about.methods[run.wish.method].split(":")[0]} · ${described(run.wish)}`);
    const button = element("button", { type: "button", "aria-current": String(run.number === shown?.number) }, element("span", {}, `Run ${run.number}`), how, what);
    button.addEventListener("click", () => watch(run));
    return element("li", {}, button);
  }));
  return runs;
}

// One run

function watch(run) {
  shown?.source.close();
  history.replaceState(null, "", `#run-${run.number}`);
  byId("welcome").hidden = true;
  byId("run").hidden = false;
  shown = {
    number: run.number, wish: run.wish, began: performance.now() - 1000 * run.seconds, running: run.running,
    points: [], stages: [], truth: [], heads: [], residual: null, worst: null, dirty: true,
    source: new EventSource(`/runs/${run.number}/events`),
  };
  byId("run").classList.toggle("phases", run.wish.method === "sculpt");
  byId("run-heading").textContent = `Run ${run.number}: ${about.methods[run.wish.method]}`;
  byId("setting").textContent = described(run.wish);
  byId("reason").textContent = "";
  byId("now").textContent = "starting";
  byId("report").href = `/runs/${run.number}/report`;
  const mine = shown;
  mine.source.onmessage = (message) => { if (mine === shown) hear(JSON.parse(message.data)); };
  mine.source.onerror = () => { if (mine === shown && mine.running) byId("now").textContent = "no answer"; };
  mine.source.addEventListener("over", (message) => {
    mine.source.close();
    if (mine === shown) finish(JSON.parse(message.data));
  });
  state(run);
  for (const button of byId("runs").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(button.firstChild.textContent === `Run ${run.number}`));
  }
}

function state(run) {
  shown.running = run.running;
  byId("run").classList.toggle("running", run.running);
  byId("state").textContent = word(run.state);
  document.querySelector(".verdict").className = `card verdict ${tones[run.state] ?? "bad"}`;
  byId("stop").hidden = !run.running;
  byId("stop").disabled = false;
  byId("report").hidden = !run.report;
  byId("no-report").hidden = run.report || run.state !== "stopped";
  byId("no-report").textContent = shown.heads.length ? "No report: it was not written in time." : "No report: there was no layer yet.";
  tick();
}

function finish(run) {
  shown.began = performance.now() - 1000 * run.seconds;
  shown.took = run.seconds;
  byId("now").textContent = "ended";
  state(run);
  list();
}

const tell = {
  truth(message) {
    shown.truth = message.heads;
    byId("setting").textContent = `${described(shown.wish)}: ${say(message.ratio)} times the counting limit`;
    byId("now").textContent = "compiling";
  },
  event(message) {
    const last = shown.stages.at(-1);
    if (message.stage === "outcome") return; // said at the top
    if (last?.stage === message.stage && !last.said) {
      Object.assign(last, { ...message, steps: last.steps + 1, said: Boolean(message.detail), error: message.error ?? last.error });
    } else {
      shown.stages.push({ ...message, steps: 1, said: Boolean(message.detail) });
    }
    if (message.error !== null) shown.residual = message.error;
    if (message.head_error !== null) shown.worst = message.head_error;
    if (message.error !== null || message.head_error !== null) shown.points.push(message);
    byId("now").textContent = message.of ? `${message.stage}, ${Math.round((100 * message.step) / message.of)} %` : message.stage;
  },
  heads(message) {
    shown.heads = message.heads;
    const errors = message.heads.flatMap((head) => [head.theta_error, head.w_error]);
    shown.worst = errors.includes(null) ? null : Math.max(...errors);
  },
  stage(message) { byId("now").textContent = message.name; },
  ended(message) {
    const reason = message.reason === message.explanation ? "" : sentence(message.reason);
    byId("reason").textContent = [sentence(message.explanation), reason, phasesAlone()].filter(Boolean).join(" ");
  },
  stopped(message) { byId("reason").textContent = sentence(message.reason); },
  failed(message) { byId("reason").textContent = sentence(message.reason); },
};

// What the paper's phases came to by themselves: polish is not part of them.
function phasesAlone() {
  const net = shown.stages.findLast((stage) => stage.stage === "phase 6: net" && stage.said);
  const polished = shown.stages.some((stage) => stage.stage === "polish");
  return net ? `Phases alone: residual ${say(net.error)}${polished ? "; the rest by polish" : ""}.` : "";
}

function hear(message) {
  tell[message.kind]?.(message);
  if (shown.dirty) return;
  shown.dirty = true;
}

// Drawing: at most once a frame, however fast the run tells

function frame() {
  if (shown?.dirty) {
    shown.dirty = false;
    byId("residual").textContent = say(shown.residual);
    byId("worst").textContent = say(shown.worst);
    drawChart(byId("chart"), shown.points);
    drawHeads();
    drawStages();
  }
  requestAnimationFrame(frame);
}

function tick() {
  if (shown) byId("clock").textContent = clock(shown.took ?? (performance.now() - shown.began) / 1000);
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawChart(box, points) {
  const width = box.clientWidth, height = box.clientHeight;
  const left = 44, right = width - 10, top = 10, bottom = height - 34;
  const values = points.flatMap((point) => [point.error, point.head_error]).filter((value) => value !== null);
  const ceiling = Math.ceil(Math.log10(Math.max(1, ...values))), foot = Math.log10(lowest);
  const x = (i) => (points.length < 2 ? left : left + ((right - left) * i) / (points.length - 1));
  const y = (value) => top + ((bottom - top) * (ceiling - Math.log10(Math.max(value, lowest)))) / (ceiling - foot);
  const drawn = svg("svg", { role: "img", viewBox: `0 0 ${width} ${height}`, "aria-label": summary(points) });
  for (let power = ceiling - (ceiling % 4); power >= foot; power -= 4) {
    drawn.append(svg("line", { class: "rule", x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power) }));
    drawn.append(svg("text", { x: left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, power === 0 ? "1" : `10${raised(power)}`));
  }
  points.forEach((point, i) => {
    if (i && point.stage !== points[i - 1].stage && points.length < 400) drawn.append(svg("line", { class: "border", x1: x(i - 0.5), x2: x(i - 0.5), y1: top, y2: bottom }));
  });
  for (const [name, series] of [["error", "s1"], ["head_error", "s2"]]) {
    const places = points.map((point, i) => [x(i), point[name]]).filter(([, value]) => value !== null).map(([at, value]) => [at, y(value)]);
    if (places.length) drawn.append(svg("polyline", { class: series, points: places.map((place) => place.join(",")).join(" ") }));
    if (points.length <= 80) for (const [cx, cy] of places) drawn.append(svg("circle", { class: series, cx, cy, r: 3 }));
  }
  const axis = points.length ? "events, all stages in a row" : shown.running ? "the first step is on its way" : "no step was made";
  drawn.append(svg("text", { x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, axis));
  box.replaceChildren(drawn);
}

function summary(points) {
  const last = points.at(-1);
  return last ? `Relative error on a log axis after ${plural(points.length, "event")}: residual ${say(shown.residual)}, largest head error ${say(shown.worst)}` : "No step yet";
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/[\da-f]{2}/gi).map((part) => parseInt(part, 16));
  return { zero: rgb("--zero"), less: rgb("--series-1"), more: rgb("--series-2") };
}

function paint(canvas, matrix, palette) {
  const bytes = Int8Array.from(atob(matrix.bytes), (c) => c.charCodeAt(0));
  canvas.width = matrix.columns;
  canvas.height = matrix.rows;
  const context = canvas.getContext("2d"), image = context.createImageData(matrix.columns, matrix.rows);
  bytes.forEach((value, i) => {
    const share = Math.abs(value) / 127, end = value < 0 ? palette.less : palette.more;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = palette.zero[c] + share * (end[c] - palette.zero[c]);
    image.data[4 * i + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

function picture(caption, label, matrix, palette) {
  const drawn = matrix ? element("canvas", { role: "img", "aria-label": label }) : element("div", { class: "blank", role: "img", "aria-label": `${label}: not there yet` });
  if (matrix) paint(drawn, matrix, palette);
  return element("figure", {}, element("figcaption", {}, caption), drawn);
}

function errorBar(symbol, error) {
  const bar = element("i", { class: error < precise ? "tiny" : "" });
  bar.style.width = `${100 * Math.min(1, Math.max(0.02, 1 - Math.log10(Math.max(error, lowest)) / Math.log10(lowest)))}%`;
  return element("div", { class: "error" }, element("div", { class: "track", "aria-hidden": "true" }, bar), element("span", {}, `error of ${symbol} ${say(error)}`));
}

function drawHeads() {
  const { truth, heads } = shown, palette = colours();
  const matched = heads.length > 0 && heads[0].theta_error !== null;
  const apart = heads.length > 0 && !matched; // another number of heads: nothing to set side by side
  byId("heads-note").textContent = apart
    ? `${plural(heads.length, "head")} at hand, ${truth.length} in the hidden layer: they cannot be matched. Colours end at its largest entry.`
    : heads.length ? "Each learned head beside the true one it is matched with. Entries: blue below zero, orange above."
    : truth.length ? "The true heads; the learned ones appear beside them." : "";
  const count = apart ? heads.length : truth.length;
  byId("head-cards").replaceChildren(...Array.from({ length: count }, (_, i) => {
    const pair = element("div", { class: "pair" });
    for (const [symbol, name] of [["Θ", "theta"], ["W", "w"]]) {
      pair.append(picture(`${symbol}, learned`, `Head ${i + 1}, ${symbol}, learned: heat map`, heads[i]?.[name], palette));
      if (!apart) pair.append(picture(`${symbol}, truth`, `Head ${i + 1}, ${symbol}, truth: heat map`, truth[i][name], palette));
      if (matched) pair.append(errorBar(symbol, heads[i][`${name}_error`]));
    }
    return element("article", { class: "head" }, element("h3", {}, `Head ${i + 1}`), pair);
  }));
}

function drawStages() {
  byId("no-stages").hidden = shown.stages.length > 0;
  byId("stages-box").hidden = shown.stages.length === 0;
  byId("stages").replaceChildren(...shown.stages.slice(-mostRows).map((stage) => {
    const name = element("th", { scope: "row" }, stage.stage);
    if (stage.detail) name.append(element("span", stage.broke_down ? { class: "bad" } : {}, stage.detail));
    return element("tr", {}, name, element("td", { class: "n" }, String(stage.steps)), element("td", { class: "n" }, say(stage.error)), element("td", { class: "n" }, clock(stage.seconds)));
  }));
  if (shown.running) byId("stages-box").scrollTop = byId("stages-box").scrollHeight;
}

// Begin

async function begin() {
  about = await (await fetch("/about")).json();
  for (const name of ["method", "inputs"]) {
    const choices = about[name === "method" ? "methods" : name];
    form.elements[name].replaceChildren(...Object.entries(choices).map(([value, text]) => element("option", { value }, text)));
  }
  for (const [name, [least, most]] of Object.entries(about.bounds)) {
    form.elements[name].min = least;
    form.elements[name].max = most;
    form.elements[name].title = `from ${least} to ${most}`;
  }
  for (const [name, wish] of Object.entries(about.presets)) {
    const button = element("button", { type: "button", "aria-pressed": "false" }, name);
    button.addEventListener("click", () => fill(wish));
    byId("presets").append(button);
  }
  fill(Object.values(about.presets)[0]);
  form.addEventListener("submit", start);
  form.addEventListener("input", mark);
  // What is typed before there are choices would be lost, so until now nothing can be.
  for (const part of form.querySelectorAll("fieldset, #start")) part.disabled = false;
  byId("stop").addEventListener("click", async () => {
    byId("stop").disabled = true;
    await post(`/runs/${shown.number}/stop`, {});
  });
  const redraw = () => { if (shown) shown.dirty = true; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  setInterval(tick, 100);
  setInterval(() => list().catch(() => {}), 3000);
  requestAnimationFrame(frame);
  const runs = await list();
  const wanted = runs.find((run) => `#run-${run.number}` === location.hash) ?? runs.find((run) => run.running);
  if (wanted && !shown) watch(wanted);
}

begin().catch(() => complain("The studio does not answer: is it still running?"));
