// The prompt as the model read it: what was kept, left out, or in the cache already.

import { count, element } from "./dom.js";

const NAMES = { kept: "kept", left_out: "left out", cached: "from the cache" };

/** Return an element that shows `done.specprefill.prompt_runs`. */
export function promptView(runs) {
  const fates = Object.keys(NAMES).filter((fate) => runs.some((run) => run.fate === fate));
  const legend = element(
    "p",
    { class: "legend" },
    ...fates.map((fate) => {
      const tokens = runs.filter((run) => run.fate === fate).reduce((sum, run) => sum + run.tokens, 0);
      return element("span", { class: `run ${fate}` }, `${NAMES[fate]}: ${count(tokens)} tokens`);
    }),
  );
  const text = element(
    "div",
    { class: "runs", tabIndex: 0, role: "region", "aria-label": "The prompt with kept tokens highlighted" },
    ...runs.map(runElement),
  );
  return element("div", {}, legend, text);
}

function runElement(run) {
  // What is kept is marked in the sense of HTML, what was left out is deleted: screen readers can tell.
  const tag = { kept: "mark", left_out: "del", cached: "span" }[run.fate];
  const title = `${count(run.tokens)} tokens ${NAMES[run.fate]}`;
  return element(tag, { class: `run ${run.fate}`, title }, run.text || `[${title}]`);
}
