// Light or dark colours: the system's setting by default, or the user's choice.

import { h } from "./dom.js";

const KEY = "agent-loop-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

export function themeSwitch() {
  const button = h("button.quiet", { onclick: () => set(NEXT[chosen()]) });
  const set = (theme) => {
    remember(theme);
    document.documentElement.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Colours: ${theme}; change`);
    button.title = `Colours: ${theme}`;
  };
  set(chosen());
  return button;
}

function chosen() {
  try {
    return localStorage.getItem(KEY) ?? "system";
  } catch {
    return document.documentElement.dataset.theme ?? "system"; // a page opened from a file may have no storage
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // without storage the choice lasts until the page is closed
  }
}
