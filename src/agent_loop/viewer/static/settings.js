// Section with the configuration of the run.

import { debounced, h, replaceChildren } from "./dom.js";

export function settings(config) {
  const list = h(".settings");
  const entries = [...flat(config, "")];
  const draw = (wanted) => {
    const found = entries.filter(({ key, value }) =>
      `${key} ${value}`.toLowerCase().includes(wanted.toLowerCase()),
    );
    replaceChildren(
      list,
      found.map(({ key, value }) => h(".setting", {}, h("code.key", {}, key), h("code", {}, value))),
    );
  };
  const search = h("input", {
    type: "search",
    placeholder: "Find a setting",
    "aria-label": "Find a setting",
    oninput: debounced((event) => draw(event.target.value), 60),
  });
  const details = h("details.more", {}, h("summary", {}, `Settings (${entries.length})`), search, list);
  details.addEventListener("toggle", () => draw(search.value), { once: true });
  return details;
}

function* flat(value, prefix) {
  if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [key, part] of Object.entries(value)) yield* flat(part, prefix ? `${prefix}.${key}` : key);
  } else {
    yield { key: prefix, value: typeof value === "string" ? value : JSON.stringify(value) };
  }
}
