// Headrace's page: one conversation over one WebSocket. See PROTOCOL.md for the frames.

import { Answer } from "./answer.js";
import { Connection } from "./connection.js";
import { byId, count, element } from "./dom.js";
import { Settings } from "./settings.js";

const TOKEN_KEY = "headrace.token";
const WIDE = "(min-width: 62rem)";
const NEAR_END_PX = 80;

class Page {
  #settings = new Settings();
  #turns = [];
  #running = new Map();
  #numbers = 0;
  #prefix = `p${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  #connection;

  constructor() {
    const url = new URL("v1/stream", document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    this.#connection = new Connection(url, {
      onModels: (models) => this.#settings.showModels(models),
      onStatus: (text, isOpen) => this.#showStatus(text, isOpen),
      onUnauthorized: (hadToken) => this.#askForToken(hadToken),
      onFrame: (direction, frame) => this.#running.get(frame.id)?.note(direction, frame),
    });
    this.#listen();
    byId("settings").open = matchMedia(WIDE).matches;
    this.#connection.open(sessionStorage.getItem(TOKEN_KEY));
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    byId("cancel").addEventListener("click", () => this.#cancelAll());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#cancelAll();
    });
    byId("new").addEventListener("click", () => this.#startOver());
    byId("file").addEventListener("change", (event) => this.#takeFile(event.target));
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#useToken();
    });
    addEventListener("pagehide", () => this.#connection.cancelAll());
  }

  // --- the connection ---

  #showStatus(text, isOpen) {
    byId("connection-text").textContent = text;
    byId("connection").dataset.open = String(isOpen);
    this.#showButtons();
  }

  #askForToken(hadToken) {
    sessionStorage.removeItem(TOKEN_KEY);
    byId("token-form").hidden = false;
    byId("token-error").textContent = hadToken ? "That token is not valid here." : "";
    byId("token").focus();
  }

  #useToken() {
    const token = byId("token").value;
    sessionStorage.setItem(TOKEN_KEY, token);
    byId("token").value = "";
    byId("token-form").hidden = true;
    this.#connection.open(token);
    byId("prompt").focus();
  }

  // --- asking ---

  #ask() {
    const prompt = byId("prompt").value;
    if (!this.#connection.isOpen || prompt.trim() === "") return;
    let requests;
    try {
      requests = this.#settings.requests(prompt, this.#history()).map((request) => this.#asFrame(request));
    } catch (error) {
      byId("composer-error").textContent = error.message;
      return;
    }
    byId("composer-error").textContent = "";
    byId("prompt").value = "";
    const group = `turn-${this.#turns.length}`;
    const answers = requests.map(({ label, frame }, index) => this.#answer(frame.id, label, group, index === 0));
    this.#addTurn(prompt, answers);
    requests.forEach(({ frame }, index) => this.#connection.start(frame, answers[index]));
    this.#showButtons();
  }

  #asFrame({ label, fields }) {
    const frame = { ...fields, id: `${this.#prefix}-${++this.#numbers}` };
    if (frame.specprefill !== false) frame.specprefill_debug = true;
    if (this.#connection.features.includes("resume")) frame.detach = true;
    const size = new TextEncoder().encode(JSON.stringify(frame)).length;
    const most = this.#connection.maxFrameBytes;
    if (size > most) throw new Error(`Too long: ${count(size)} bytes, and this server takes ${count(most)}.`);
    return { label, frame };
  }

  #answer(id, label, group, isFirst) {
    const answer = new Answer(
      { id, label, group, isFirst },
      {
        onCancel: () => this.#connection.cancel(id),
        onText: () => this.#follow(),
        onEnd: () => this.#ended(answer),
      },
    );
    this.#running.set(id, answer);
    return answer;
  }

  #addTurn(prompt, answers) {
    this.#turns.push({ prompt, answers });
    byId("empty").hidden = true;
    const question = element("div", { class: "question text" }, prompt);
    const cards = element("div", { class: "answers" }, ...answers.map((answer) => answer.element));
    byId("turns").append(element("li", {}, element("h2", { class: "hidden" }, "You"), question, cards));
    cards.scrollIntoView({ block: "end" });
    const noun = answers.length === 1 ? "One answer was" : `${answers.length} answers were`;
    this.#announce(`${noun} asked for.`);
  }

  #history() {
    return this.#turns.flatMap(({ prompt, answers }) => {
      const chosen = answers.find((answer) => answer.isChosen && answer.text) ?? answers.find(({ text }) => text);
      if (chosen === undefined) return [];
      return [{ role: "user", content: prompt }, { role: "assistant", content: chosen.text }];
    });
  }

  #ended(answer) {
    this.#running.delete(answer.id);
    const state = answer.element.dataset.state;
    this.#announce(`${answer.label || "The answer"}: ${state}. ${answer.text}`);
    this.#showButtons();
    this.#follow();
  }

  #cancelAll() {
    for (const id of this.#running.keys()) this.#connection.cancel(id);
  }

  #startOver() {
    this.#cancelAll();
    this.#turns = [];
    byId("turns").replaceChildren();
    byId("empty").hidden = false;
    byId("prompt").focus();
  }

  async #takeFile(input) {
    const [file] = input.files;
    input.value = "";
    if (file === undefined) return;
    const prompt = byId("prompt");
    prompt.value = `${await file.text()}\n\n${prompt.value}`;
    prompt.focus();
  }

  // --- what is seen and heard ---

  #showButtons() {
    byId("send").disabled = !this.#connection.isOpen;
    byId("cancel").disabled = this.#running.size === 0;
  }

  /** Stay at the end of the conversation, unless its reader has scrolled away from it. */
  #follow() {
    const area = byId("conversation");
    const isNear = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_END_PX;
    if (isNear) area.scrollTop = area.scrollHeight;
  }

  #announce(text) {
    byId("announcements").textContent = text;
  }
}

new Page();
