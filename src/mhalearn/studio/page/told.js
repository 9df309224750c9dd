// What a run has told, and how it stood at any moment. Nothing here touches the page.

// A moment is a number of events: 0 is before the first, events.length is now.
export class Told {
  constructor(run) {
    Object.assign(this, { run, running: run.running, events: [], frames: [], cards: [], accounts: [], words: {}, truth: [], neurons: null, limits: null, ratio: null, phases: [], floor: null, reason: "", now: "starting" });
  }

  hear(message) {
    this[`hear_${message.kind}`]?.(message);
  }

  hear_begin(message) {
    this.truth = message.heads;
    this.neurons = message.neurons ?? null;
    this.limits = message.limits;
    this.ratio = message.ratio;
    this.floor = message.floor;
    this.phases = message.phases;
    this.now = "compiling";
  }

  hear_event(message) {
    this.events.push(message);
    if (message.words) this.words[message.stage] = message.words;
    this.now = message.of ? `${message.stage}, ${Math.round((100 * message.step) / message.of)} %` : message.stage;
  }

  hear_heads(message) { this.frames.push(message); }
  hear_asked(message) { this.accounts.push(message); }
  hear_phase(message) { this.cards.push(message); }
  hear_stage(message) { this.now = message.name; }

  hear_ended(message) {
    const reason = message.reason === message.explanation ? "" : message.reason;
    this.reason = [message.explanation, reason].filter(Boolean);
    this.floor = message.floor ?? this.floor;
    this.ended = true;
  }

  hear_stopped(message) { this.reason = [message.reason]; }
  hear_failed(message) { this.reason = [message.reason]; }

  // The last event that had a value of this name by then.
  value(name, moment) {
    return this.events.slice(0, Math.floor(moment)).findLast((event) => event[name] !== null)?.[name] ?? null;
  }

  // The picture of a moment, the one after it, and how far it is on the way there.
  picture(moment) {
    const at = this.frames.findLastIndex((frame) => frame.at <= moment);
    const frame = this.frames[at], next = this.frames[at + 1];
    return { frame, next, share: frame && next && next.at > frame.at ? (moment - frame.at) / (next.at - frame.at) : 0 };
  }

  // How the account of a box that is asked stood; null where none is.
  asked(moment) {
    return this.accounts.findLast((one) => one.at <= moment) ?? null;
  }

  // What is known of each phase by then: its last card, and whether it is being worked on.
  phase(number, moment) {
    const seen = this.events.slice(0, Math.floor(moment)), last = seen.at(-1);
    const cardOf = (which) => this.cards.findLast((one) => one.number === which && one.at <= moment);
    const card = cardOf(number), current = last?.phase ?? null;
    const justEnded = (one) => Boolean(one?.whole) && one.at === seen.length;
    const own = current === number && !justEnded(card);
    const next = this.running && moment >= this.events.length && !card && current === number - 1 && justEnded(cardOf(current));
    return { card, active: own || next, progress: own && last.of ? last.step / last.of : null };
  }

  // Events of one stage in a row, as the table lists them; who says something else begins a row.
  stages() {
    const rows = [];
    this.events.forEach((event, i) => {
      const last = rows.at(-1);
      if (event.stage === "outcome") return; // said at the top
      if (last?.stage === event.stage && (!last.detail || last.detail === event.detail)) Object.assign(last, { ...event, steps: last.steps + 1, error: event.error ?? last.error, from: last.from, to: i + 1 });
      else rows.push({ ...event, steps: 1, from: i + 1, to: i + 1 });
    });
    return rows;
  }
}
