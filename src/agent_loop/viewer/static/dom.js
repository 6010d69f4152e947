// Creation of DOM elements. Data of a run is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an HTML element: `h("a.link", {href, onclick}, "text", child, ...)`. Null and false children are skipped. */
export function h(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElement(name || "div"), classes, properties, children);
}

/** Returns an SVG element; see `h`. */
export function svg(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElementNS(SVG, name), classes, properties, children);
}

export function replaceChildren(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
}

function filled(element, classes, properties, children) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style")
      for (const [rule, set] of Object.entries(value)) element.style.setProperty(rule, set);
    else if (key === "class") element.setAttribute("class", [...classes, value].join(" "));
    else if (key === "value" || key === "checked" || key === "selected") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child != null && child !== false) element.append(child);
  return element;
}

/** Returns a function that calls `action` at most once per frame, with the last arguments. */
export function oncePerFrame(action) {
  let last = null;
  return (...given) => {
    const waits = last !== null;
    last = given;
    if (!waits) {
      requestAnimationFrame(() => {
        const now = last;
        last = null;
        action(...now);
      });
    }
  };
}

/** Returns a function that calls `action` after `delay` ms without further calls. */
export function debounced(action, delay = 150) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), delay);
  };
}
