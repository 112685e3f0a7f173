// One WebSocket for all streams of the page. It comes back by itself, and goes on with what was running.
//
// A stream is an object with `onFrame(frame)`, and is told of exactly one end: `done`, `error`, or `lost`,
// a frame of this file's own for a stream that nobody can go on with.

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 15_000;
const MODELS_INTERVAL_MS = 2000;
const UNAUTHORIZED = 4401;

/** Write a token as the subprotocol by which browsers, which cannot set headers, show it. */
function bearer(token) {
  const bytes = new TextEncoder().encode(token);
  const base64 = btoa(String.fromCharCode(...bytes));
  return `headrace.bearer.${base64.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}

export class Connection {
  #url;
  #events;
  #socket = null;
  #hello = null;
  #token = null;
  #attempts = 0;
  #timer = 0;
  #streams = new Map();

  /**
   * @param {URL} url
   * @param {{onModels(models: object[]): void, onStatus(text: string, isOpen: boolean): void,
   *          onUnauthorized(hadToken: boolean): void, onFrame(direction: string, frame): void}} events
   */
  constructor(url, events) {
    this.#url = url;
    this.#events = events;
  }

  get isOpen() {
    return this.#hello !== null;
  }

  get features() {
    return this.#hello?.features ?? [];
  }

  get maxFrameBytes() {
    return this.#hello?.limits.max_frame_bytes ?? Infinity;
  }

  /** Connect, with a token or null; again and again until it works. */
  open(token) {
    this.#token = token;
    this.#attempts = 0;
    this.#connect();
  }

  /** Send a request frame; its stream gets every frame that comes back. */
  start(frame, stream) {
    this.#streams.set(frame.id, { stream, resumeToken: null, lastSeq: -1 });
    this.#send(frame);
  }

  cancel(id) {
    if (this.#streams.has(id) && this.isOpen) this.#send({ type: "cancel", id });
  }

  /** Cancel everything: the page is about to go, and nobody will read the rest. */
  cancelAll() {
    for (const id of this.#streams.keys()) this.cancel(id);
  }

  #send(frame) {
    this.#socket.send(JSON.stringify(frame));
    this.#events.onFrame("sent", frame);
  }

  #connect() {
    clearTimeout(this.#timer);
    this.#events.onStatus("connecting …", false);
    const protocols = ["headrace.v1"];
    if (this.#token) protocols.push(bearer(this.#token));
    const socket = new WebSocket(this.#url, protocols);
    this.#socket = socket;
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    socket.onclose = ({ code }) => {
      if (this.#socket === socket) this.#closed(code);
    };
  }

  #closed(code) {
    this.#hello = null;
    for (const [id, { stream, resumeToken }] of this.#streams) {
      if (resumeToken !== null && code !== UNAUTHORIZED) continue; // to be gone on with
      this.#streams.delete(id);
      stream.onFrame({ type: "lost", id });
    }
    if (code === UNAUTHORIZED) {
      this.#events.onStatus("not authorised", false);
      this.#events.onUnauthorized(this.#token !== null);
      return;
    }
    const most = Math.min(MAX_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#attempts++);
    const delay = most * (0.5 + Math.random() / 2);
    this.#events.onStatus(`not connected; trying again in ${Math.ceil(delay / 1000)} s`, false);
    this.#timer = setTimeout(() => this.#connect(), delay);
  }

  #receive(frame) {
    this.#events.onFrame("received", frame);
    if (frame.type === "hello") {
      this.#hello = frame;
      this.#attempts = 0;
      this.#events.onStatus("connected", true);
      this.#showModels(frame.models);
      this.#resume();
    } else if (frame.type === "models") {
      this.#showModels(frame.models);
    } else if (frame.type === "goaway") {
      this.#events.onStatus("the server is about to stop", true);
    } else if (this.#streams.has(frame.id)) {
      this.#deliver(frame);
    }
  }

  /** Show the models, and ask again while one of them is on its way. */
  #showModels(models) {
    this.#events.onModels(models);
    if (models.every(({ state }) => state === "ready" || state === "failed")) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.isOpen && this.#send({ type: "models" }), MODELS_INTERVAL_MS);
  }

  #deliver(frame) {
    const entry = this.#streams.get(frame.id);
    if (frame.type === "accepted") entry.resumeToken = frame.resume_token ?? null;
    if (frame.seq !== undefined) entry.lastSeq = frame.seq;
    if (frame.type === "done" || frame.type === "error" || frame.type === "detached") {
      this.#streams.delete(frame.id);
    }
    entry.stream.onFrame(frame);
  }

  #resume() {
    for (const [id, { resumeToken, lastSeq }] of this.#streams) {
      this.#send({ type: "resume", id, token: resumeToken, after_seq: lastSeq });
    }
  }
}
