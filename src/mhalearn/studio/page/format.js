// Words, numbers and elements that every part of the page uses.

export const byId = (id) => document.getElementById(id);
export const tones = { running: "busy", RECOVERED: "good", RECOVERED_ON_SPAN: "good", FITTED: "fair", NOT_IDENTIFIED: "fair", TIME_LIMIT: "fair", stopped: "fair" };

export const raised = (n) => String(n).replace("-", "⁻").replace(/\d/g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);

export function say(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || (value >= 0.01 && value < 1000)) return String(Number(value.toPrecision(2)));
  if (value >= 1000 && value < 1e6) return Number(value.toPrecision(2)).toLocaleString("en");
  const [digits, power] = value.toExponential(1).split("e");
  return `${digits}·10${raised(Number(power))}`;
}

export const clock = (s) => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`);
export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "");
export const word = (state) => ({ running: "learning", stopped: "stopped", failed: "failed" })[state] ?? state.replaceAll("_", " ");
export const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

export function described(wish, data) {
  const noise = wish.noise > 0 && !data ? `, noise ${wish.noise}` : "";
  const heads = wish.count_heads && data ? "any number of heads" : plural(wish.heads, "head");
  const neurons = wish.block ? `, ${plural(wish.neurons, "neuron")}` : "";
  return `${data ? `${data.name}: ` : ""}${heads}${neurons}, d = ${wish.dim}, ${wish.tokens} tokens, ${wish.ask ? `at most ${plural(wish.examples, "call")}` : plural(wish.examples, "example")}${noise}`;
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export async function post(address, body) {
  const answer = await fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  return answer.json();
}
