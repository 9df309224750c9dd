// The form: what a run is to be, checked by counting while it is filled in.
import { byId, element, post, say } from "./format.js";

const form = byId("ask");
const numbers = ["heads", "dim", "scale", "seed", "examples", "tokens", "noise", "seconds", "neurons"];
const flags = ["causal", "bias", "residual"]; // of own data
const ofDrawn = ["dim", "scale", "examples", "tokens", "noise", "neurons"]; // which a file decides
const choices = { method: "methods", inputs: "inputs", activation: "activations", norm: "norms" };
let about, data = null, checks = 0, waiting;

export function fill(wish, file) {
  for (const [name, value] of Object.entries(wish)) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  useFile(file);
}

// Own data in place of a hidden layer; null goes back to one.
export function useFile(file) {
  data = file;
  form.classList.toggle("own", data !== null);
  showKind();
  byId("file").hidden = data === null;
  if (data) byId("file-said").textContent = `${data.name}: ${data.n} examples of ${data.shortest < data.k ? `${data.shortest} to ` : ""}${data.k} tokens, ${data.d} features, ${data.out_dim} outputs`;
  complain("");
  check();
}

// A whole block is hidden in place of a layer.
const isBlock = () => data === null && form.elements.block.checked;

function showKind() {
  form.classList.toggle("block", isBlock());
  byId("hidden-name").textContent = isBlock() ? "The block" : "The layer";
  for (const [name, [least, most]] of Object.entries(bounds())) Object.assign(form.elements[name], { min: least, max: most, title: `from ${least} to ${most}` });
}

const bounds = () => (isBlock() ? about.block_bounds : about.bounds);

function asked() {
  const { method, count_heads, inputs, activation, norm, ask } = form.elements, block = isBlock();
  const wish = { method: block ? Object.keys(about.methods)[0] : method.value, count_heads: count_heads.checked };
  for (const name of fields()) wish[name] = form.elements[name].value.trim() === "" ? null : Number(form.elements[name].value);
  for (const name of flags) wish[name] = data !== null && form.elements[name].checked;
  if (data) return { ...wish, data: data.number, ask: false };
  const kind = block ? { activation: activation.value, norm: norm.value } : {};
  return { ...wish, ...kind, block, data: 0, ask: !block && ask.checked, inputs: inputs.value };
}

const fields = () => numbers.filter((name) => (!data || !ofDrawn.includes(name)) && (isBlock() || name !== "neurons"));
const labelOf = (name) => form.elements[name].labels[0].textContent.trim();

function mark() {
  const now = asked();
  for (const button of byId("presets").children) {
    const wish = about.presets[button.textContent];
    button.setAttribute("aria-pressed", String(Object.keys(wish).every((name) => !(name in now) || wish[name] === now[name])));
  }
}

export function complain(line, take = false) {
  byId("problem").textContent = line;
  for (const name of numbers) {
    const at = line.startsWith(`${name} is `) || line.startsWith(`${labelOf(name)} is `);
    form.elements[name].setAttribute("aria-invalid", String(at));
    if (at && take) form.elements[name].focus();
  }
}

function outOfBounds() {
  const wish = asked();
  for (const name of fields()) {
    const [least, most] = bounds()[name];
    if (wish[name] === null || !Number.isFinite(wish[name])) return `${labelOf(name)} is not a number: choose from ${least} to ${most}`;
    if (wish[name] < least || wish[name] > most) return `${labelOf(name)} is ${wish[name]}: choose from ${least} to ${most}`;
  }
  return "";
}

// Asks the server what counting knows; true where nothing stands against the run.
async function check(take = false) {
  mark();
  clearTimeout(waiting);
  const mine = ++checks, line = outOfBounds();
  byId("count").textContent = "";
  complain(line, take);
  if (line) return false;
  const known = await post("/check", asked());
  if (mine !== checks) return !known.problem;
  if (known.limit) byId("count").textContent = `By counting, at least ${known.limit} examples; here are ${say(known.ratio)} times the limit.`;
  complain(known.problem ? known.problem[0].toUpperCase() + known.problem.slice(1) : "", take);
  return !known.problem;
}

async function start(event, watch) {
  event.preventDefault();
  byId("start").disabled = true;
  try {
    if (!(await check(true))) return;
    const answer = await post("/runs", asked());
    if (answer.error) return complain(answer.error, true);
    await watch(answer);
  } catch {
    complain("The studio does not answer: is it still running?");
  } finally {
    byId("start").disabled = false;
  }
}

export function begin(known, watch) {
  about = known;
  for (const [name, of] of Object.entries(choices)) {
    form.elements[name].replaceChildren(...Object.entries(about[of]).map(([value, text]) => element("option", { value }, text)));
  }
  for (const [name, wish] of Object.entries(about.presets)) {
    const button = element("button", { type: "button", "aria-pressed": "false", disabled: "" }, name);
    button.addEventListener("click", () => fill(wish, null));
    byId("presets").append(button);
  }
  fill(Object.values(about.presets)[0], null);
  form.addEventListener("submit", (event) => start(event, watch));
  form.addEventListener("input", () => {
    showKind();
    mark();
    clearTimeout(waiting);
    waiting = setTimeout(check, 300);
  });
  byId("no-file").addEventListener("click", () => useFile(null));
}

// What is typed before there are choices, and a run to follow, would be lost: only then it can be.
export function open() {
  for (const part of [...form.querySelectorAll("fieldset, #start, #choose"), ...byId("presets").children]) part.disabled = false;
}
