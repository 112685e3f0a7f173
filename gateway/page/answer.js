// One stream on the page: a card that shows it from the first progress to the last frame.

import { count, duration, element, rate } from "./dom.js";
import { promptView } from "./prompt-view.js";

const MAX_RAW_FRAMES = 5000;
const PHASES = {
  load: "Loading the model",
  queue: "Waiting for requests before this one",
  recover: "Another engine process takes over",
  score: "Scoring the prompt",
  prefill: "Reading the prompt",
};

export class Answer {
  text = "";
  isRunning = true;
  #frames = [];
  #numTokens = 0;
  #firstTokenAt = 0;
  #sentAt = performance.now();
  #isSparse = false;
  #events;
  #parts;

  /**
   * @param {{id: string, label: string, group: string, isFirst: boolean}} what
   * @param {{onCancel(): void, onEnd(answer: Answer): void, onText(): void}} events
   */
  constructor({ id, label, group, isFirst }, events) {
    this.id = id;
    this.label = label;
    this.#events = events;
    this.#parts = this.#build(group, isFirst);
    this.element = this.#parts.card;
  }

  #build(group, isFirst) {
    const name = this.label || "answer";
    const chosen = element("input", { type: "radio", name: group, checked: isFirst });
    const parts = {
      chosen,
      state: element("span", { class: "state" }, "sent"),
      cancel: element("button", { type: "button", class: "quiet small" }, "Cancel"),
      phase: element("span", {}, "Sent"),
      bar: element("progress", { "aria-label": "Progress before the first token" }),
      reasoning: element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning")),
      thought: element("div", { class: "text" }),
      text: element("div", { class: "text", "aria-busy": "true" }),
      stats: element("p", { class: "stats" }),
      spec: element("p", { class: "stats", hidden: true }),
      prompt: element("details", { hidden: true }, element("summary", {}, "The prompt as it was read")),
      raw: element("details", {}, element("summary", {}, "Raw frames")),
      frames: element("pre", { tabIndex: 0, role: "region", "aria-label": "Raw frames" }),
    };
    parts.waiting = element("div", { class: "waiting" }, parts.phase, parts.bar);
    parts.reasoning.append(parts.thought);
    parts.raw.append(parts.frames);
    parts.raw.addEventListener("toggle", () => this.#showFrames());
    parts.cancel.setAttribute("aria-label", `Cancel the ${name}`);
    parts.cancel.addEventListener("click", () => this.#events.onCancel());
    const choose = element("label", { class: "choose" }, chosen, "go on with this one");
    choose.hidden = this.label === "";
    const title = element("h3", {}, this.label || "Answer");
    parts.card = element(
      "article",
      { class: "answer", "aria-label": name, "data-id": this.id },
      element("div", { class: "row" }, title, parts.state, element("span", { class: "space" }), parts.cancel),
      parts.waiting,
      parts.reasoning,
      parts.text,
      parts.stats,
      parts.spec,
      choose,
      parts.prompt,
      parts.raw,
    );
    return parts;
  }

  /** Whether the conversation goes on with this answer. */
  get isChosen() {
    return this.#parts.chosen.checked;
  }

  /** Take a frame of the stream. */
  onFrame(frame) {
    switch (frame.type) {
      case "accepted":
        this.#setState("waiting");
        break;
      case "progress":
        this.#showProgress(frame);
        break;
      case "delta":
        this.#showTokens(frame);
        break;
      case "done":
        this.#showEnd(frame);
        break;
      case "error":
        this.#end("refused", `${frame.message} (${frame.code})`);
        break;
      case "detached":
      case "lost":
        this.#end("lost", "The connection was lost.");
    }
  }

  /** Keep a frame to be shown on demand. */
  note(direction, frame) {
    const line = `${direction === "sent" ? "→" : "←"} ${JSON.stringify(frame)}\n`;
    if (this.#frames.length < MAX_RAW_FRAMES) this.#frames.push(line);
    if (this.#parts.raw.open) this.#parts.frames.append(line);
  }

  #showFrames() {
    this.#parts.frames.textContent = this.#parts.raw.open ? this.#frames.join("") : "";
  }

  #setState(state) {
    this.#parts.state.textContent = state;
    this.#parts.card.dataset.state = state;
  }

  #showProgress({ phase, processed, total, cached }) {
    const { bar, waiting } = this.#parts;
    this.#setState(phase);
    waiting.hidden = false;
    this.#isSparse ||= phase === "score";
    let text = PHASES[phase] ?? phase;
    if (phase === "prefill" && this.#isSparse) text = "Reading the kept tokens";
    if (total) {
      bar.max = total;
      bar.value = processed;
      text += `: ${count(processed)} of ${count(total)}`;
      if (phase === "score" || phase === "prefill") text += " tokens";
    } else {
      bar.removeAttribute("value");
    }
    if (cached) text += ` (and ${count(cached)} from the cache)`;
    this.#parts.phase.textContent = text;
  }

  #showTokens({ text, reasoning, n }) {
    const parts = this.#parts;
    const now = performance.now();
    if (this.#firstTokenAt === 0) this.#firstTokenAt = now;
    if (!parts.waiting.hidden) {
      parts.waiting.hidden = true;
      this.#setState("streaming");
    }
    this.#numTokens += n;
    this.text += text;
    if (text) parts.text.append(text);
    if (reasoning) {
      parts.reasoning.hidden = false;
      parts.thought.append(reasoning);
    }
    const seconds = (now - this.#firstTokenAt) / 1000;
    const speed = this.#numTokens > 1 && seconds > 0 ? ` · ${rate((this.#numTokens - 1) / seconds)} tokens/s` : "";
    const ttft = duration(this.#firstTokenAt - this.#sentAt);
    parts.stats.textContent = `${count(this.#numTokens)} tokens${speed} · first after ${ttft}`;
    this.#events.onText();
  }

  #showEnd(frame) {
    const { usage, timings, specprefill: spec } = frame;
    const facts = [`${count(usage.completion_tokens)} tokens`];
    if (timings.tokens_per_s) facts.push(`${rate(timings.tokens_per_s)} tokens/s`);
    if (timings.ttft_ms !== null) facts.push(`first after ${duration(timings.ttft_ms)}`);
    const cached = usage.cached_tokens ? `, ${count(usage.cached_tokens)} of them cached` : "";
    const read = timings.prefill_ms === null ? "" : `, read in ${duration(timings.score_ms + timings.prefill_ms)}`;
    facts.push(`prompt ${count(usage.prompt_tokens)} tokens${cached}${read}`);
    this.#parts.stats.textContent = facts.join(" · ");
    this.#showSpecPrefill(spec);
    const state = frame.status === "completed" ? "done" : frame.status;
    const isExpected = frame.status === "completed" || frame.reason === "client";
    this.#end(state, isExpected ? "" : `${frame.error?.message ?? "ended early"} (${frame.reason})`);
    if (frame.finish_reason === "length") this.#parts.state.textContent = "done: length limit";
  }

  #showSpecPrefill(spec) {
    const { spec: line, prompt } = this.#parts;
    const isOff = spec.reason === "disabled" || spec.reason === "off_by_request";
    line.hidden = isOff && spec.requested === null;
    if (spec.applied) {
      const share = Math.round((100 * spec.kept_tokens) / spec.uncached_tokens);
      line.textContent =
        `SpecPrefill kept ${count(spec.kept_tokens)} of ${count(spec.uncached_tokens)} tokens (${share} %) · ` +
        `scored in ${duration(spec.score_ms)}, read in ${duration(spec.prefill_ms)} · draft ${spec.draft}`;
    } else {
      line.textContent = `SpecPrefill not used: ${spec.reason.replaceAll("_", " ")}`;
    }
    if (spec.prompt_runs) {
      prompt.hidden = false;
      prompt.append(promptView(spec.prompt_runs));
    }
  }

  #end(state, problem) {
    if (!this.isRunning) return;
    this.isRunning = false;
    const parts = this.#parts;
    this.#setState(state);
    parts.waiting.hidden = true;
    parts.cancel.remove();
    parts.text.removeAttribute("aria-busy");
    if (problem) parts.text.after(element("p", { class: "problem" }, problem));
    this.#events.onEnd(this);
  }
}
