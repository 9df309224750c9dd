// Own data: dropped anywhere on the page, or chosen; sent to the studio on this machine alone.
import { byId } from "./format.js";
import { useFile } from "./form.js";

let about;

function tell(line, problem = false) {
  byId("drop-said").textContent = line;
  byId("drop-said").className = problem ? "problem" : "muted";
}

async function send(files) {
  const size = files.reduce((sum, file) => sum + file.size, 0), complain = (line) => tell(line, true);
  const wrong = files.find((file) => !about.endings.some((ending) => file.name.toLowerCase().endsWith(ending)));
  if (files.length === 0) return;
  if (wrong) return complain(`${wrong.name}: not a format of examples; drop one of ${about.endings.join(", ")}`);
  if (size > about.file_bytes) return complain(`${Math.ceil(size / 1e6)} MB are too much for this page, which takes at most ${Math.floor(about.file_bytes / 1e6)}: use mhalearn learn`);
  tell("Reading …");
  try {
    const names = files.map((file) => `file=${file.size}:${encodeURIComponent(file.name)}`).join("&");
    const answer = await fetch(`/data?${names}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: new Blob(files) });
    const found = await answer.json();
    if (found.error) return complain(found.error);
    tell("");
    useFile(found);
  } catch {
    complain("The file could not be read: choose it again.");
  }
}

export function begin(known) {
  about = known;
  byId("choose").addEventListener("change", () => {
    send([...byId("choose").files]);
    byId("choose").value = "";
  });
  let within = 0;
  const over = (event) => { event.preventDefault(); document.body.classList.toggle("dropping", within > 0); };
  addEventListener("dragenter", (event) => { within++; over(event); });
  addEventListener("dragleave", (event) => { within = Math.max(0, within - 1); over(event); });
  addEventListener("dragover", over);
  addEventListener("drop", (event) => {
    within = 0;
    over(event);
    send([...event.dataTransfer.files]);
  });
}
