// Keyboard shortcuts. Each page registers its own; `?` lists them.

import { h, replaceChildren } from "./dom.js";
import { go } from "./router.js";

let everywhere = [
  { keys: ["g o"], about: "overview", action: () => go("#/overview") },
  { keys: ["g t"], about: "trajectories", action: () => go("#/trajectories") },
  { keys: ["g w"], about: "time page", action: () => go("#/time") },
  { keys: ["?"], about: "keyboard shortcuts", action: () => showHelp() },
];

let ofPage = [];
let prefix = "";
let dialog = null;

/** Sets the shortcuts of all pages, in addition to `?`. */
export function setKeysEverywhere(bindings) {
  everywhere = [...bindings, everywhere.at(-1)];
}

/** Sets the shortcuts of the current page: `[{keys, about, action}]`. */
export function setKeys(bindings) {
  ofPage = bindings;
}

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (dialog?.open) return;
    const pressed = prefix ? `${prefix} ${event.key}` : event.key;
    const found = [...ofPage, ...everywhere].find(({ keys }) => keys.includes(pressed));
    prefix = "";
    if (found) {
      event.preventDefault();
      found.action(event);
    } else if (event.key === "g") {
      prefix = "g";
      setTimeout(() => (prefix = ""), 1200);
    }
  });
}

export function showHelp() {
  dialog ??= document.body.appendChild(h("dialog.help", { "aria-labelledby": "help-title" }));
  replaceChildren(
    dialog,
    h("h2", { id: "help-title" }, "Keys"),
    ofPage.length > 0 && [h("h3", {}, "On this page"), listOf(ofPage)],
    h("h3", {}, "Everywhere"),
    listOf(everywhere),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  dialog.showModal();
}

function listOf(bindings) {
  return h(
    "dl.keys",
    {},
    bindings.map(({ keys, about }) => [
      h(
        "dt",
        {},
        keys.map((key) => h("kbd", {}, NAMES[key] ?? key)),
      ),
      h("dd", {}, about),
    ]),
  );
}

const NAMES = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Enter: "↵", Escape: "esc" };

function isTyping(element) {
  return element.matches?.(
    "input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select",
  );
}
