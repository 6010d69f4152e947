// Menus that open over the page: Escape or a click elsewhere closes them.

const OPEN = "details.menu[open]";

/** Starts to close menus, and returns a function that ends it. */
export function listenToPopovers() {
  document.addEventListener("keydown", closeByKey, true); // before the page's own meaning of Escape
  document.addEventListener("pointerdown", closeOthers);
  return () => {
    document.removeEventListener("keydown", closeByKey, true);
    document.removeEventListener("pointerdown", closeOthers);
  };
}

function closeByKey(event) {
  const menu = event.key === "Escape" ? document.querySelector(OPEN) : null;
  if (!menu) return;
  event.preventDefault();
  menu.open = false;
  menu.querySelector("summary").focus();
}

function closeOthers({ target }) {
  for (const menu of document.querySelectorAll(OPEN)) if (!menu.contains(target)) menu.open = false;
}
