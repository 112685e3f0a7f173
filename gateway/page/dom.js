// The one way in which this page makes elements: never from text that is parsed as HTML.

/**
 * Return a new element.
 * @param {string} tag
 * @param {Record<string, unknown>} [properties] DOM properties; `class` and names with a dash are attributes
 * @param {...(Node | string)} children
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) made.setAttribute(name, String(value));
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Return the element with an id; a missing one is a mistake of this page. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element #${id}`);
  return found;
}

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const decimals = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Write a count: 1,480. */
export const count = (number) => integers.format(number);

/** Write a rate: 38.6. */
export const rate = (number) => decimals.format(number);

/** Write milliseconds as people say them. */
export function duration(ms) {
  return ms < 1000 ? `${integers.format(ms)} ms` : `${decimals.format(ms / 1000)} s`;
}
