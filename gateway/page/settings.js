// The form of settings: what it says as request frames, one for each answer that is wanted.

import { byId, element } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const SEED_RANGE = 2 ** 31;

export class Settings {
  #form = byId("options");
  #models = [];

  constructor() {
    const own = byId("keep-own");
    const slider = byId("keep");
    const show = () => {
      slider.disabled = !own.checked;
      byId("keep-value").textContent = own.checked ? `${slider.value} %` : "server’s";
    };
    own.addEventListener("change", show);
    slider.addEventListener("input", show);
    show();
    byId("model").addEventListener("change", () => this.#showAbility());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Show the server's models, and keep the choice where it is still one. */
  showModels(models) {
    this.#models = models;
    const select = byId("model");
    const before = select.value;
    select.replaceChildren(
      ...models.map((model) => {
        const state = model.state === "ready" ? "" : ` (${model.state})`;
        return element("option", { value: model.name }, model.name + state);
      }),
    );
    if (models.some((model) => model.name === before)) select.value = before;
    this.#showAbility();
  }

  #showAbility() {
    const model = this.#models.find(({ name }) => name === byId("model").value);
    if (model === undefined) return;
    const { supported, reason, draft } = model.specprefill;
    byId("specprefill-ability").textContent = supported
      ? `Draft: ${draft === "self" ? "the model’s own first layers" : draft}`
      : reason === "not_loaded"
        ? "Known once the model is loaded"
        : `Not available: ${reason}`;
    if (model.chat === false) byId("kind").value = "completion";
  }

  /**
   * Return what to ask: one `{label, fields}` for each answer.
   * @param {string} prompt
   * @param {{role: string, content: string}[]} history the conversation so far
   * @throws {Error} a field has a value that makes no sense; the message is for people
   */
  requests(prompt, history) {
    const invalid = this.#form.querySelector("input:invalid");
    if (invalid !== null) {
      const label = this.#form.querySelector(`label[for="${invalid.id}"]`);
      throw new Error(`${label?.textContent ?? invalid.id}: ${invalid.validationMessage}`);
    }
    const data = new FormData(this.#form);
    const fields = { ...this.#input(data, prompt, history), ...this.#options(data) };
    return this.#variants(data.get("variants"), fields);
  }

  #input(data, prompt, history) {
    if (data.get("kind") === "completion") return { type: "completion", prompt };
    const system = data.get("system").trim();
    const messages = [...history, { role: "user", content: prompt }];
    if (system) messages.unshift({ role: "system", content: system });
    return { type: "chat", messages };
  }

  #options(data) {
    const options = { model: data.get("model") };
    for (const name of NUMBERS) {
      if (data.get(name) !== "") options[name] = Number(data.get(name));
    }
    if (data.get("timeout_s") !== "") options.timeout_ms = 1000 * Number(data.get("timeout_s"));
    const stop = data.get("stop").split("\n").filter((line) => line !== "");
    if (stop.length) options.stop = stop;
    if (!data.has("cache_prompt")) options.cache_prompt = false;
    const choice = data.get("specprefill");
    if (choice !== "default") options.specprefill = choice === "on";
    if (data.has("keep_own") && choice !== "off") options.specprefill_keep_pct = data.get("keep") / 100;
    return options;
  }

  #variants(wanted, fields) {
    switch (wanted) {
      case "compare": {
        // A prompt that the first answer has put into the cache would need no prefill at all.
        const fresh = { ...fields, cache_prompt: false };
        const { specprefill_keep_pct: _, ...dense } = fresh;
        return [
          { label: "dense", fields: { ...dense, specprefill: false } },
          { label: "sparse", fields: { ...fresh, specprefill: true } },
        ];
      }
      case "rates":
        return [10, 30, 60].map((percent) => ({
          label: `keep ${percent} %`,
          fields: {
            ...fields,
            cache_prompt: false,
            specprefill: true,
            specprefill_keep_pct: percent / 100,
          },
        }));
      case "seeds": {
        const first = fields.seed ?? Math.floor(Math.random() * SEED_RANGE);
        return [0, 1, 2].map((step) => ({
          label: `seed ${first + step}`,
          fields: { ...fields, temperature: fields.temperature || 0.8, seed: first + step },
        }));
      }
      default:
        return [{ label: "", fields }];
    }
  }
}
