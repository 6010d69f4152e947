// The fragment of the URL holds the state of the page, so that it can be shared: `#/page?name=value`.

const listeners = [];

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { page: path || homePage(), parameters: new URLSearchParams(query) };
}

/** Returns the page that is shown if the address names none. */
export function homePage() {
  return document.documentElement.dataset.home ?? "overview";
}

export function address(page, parameters = {}) {
  const given = Object.entries(parameters).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const query = new URLSearchParams(given).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

export function go(target) {
  location.hash = target;
}

/** Changes parameters of the current page without a history entry. A null value removes a parameter. */
export function adjust(changes) {
  const { page, parameters } = here();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "" || value === undefined) parameters.delete(name);
    else parameters.set(name, value);
  }
  const target = address(page, Object.fromEntries(parameters));
  if (target !== location.hash) {
    history.replaceState(null, "", target);
    announce();
  }
}

/** Calls `listener` with `here()` whenever the address changes. */
export function onChange(listener) {
  listeners.push(listener);
}

function announce() {
  const place = here();
  for (const listener of listeners) listener(place);
}

window.addEventListener("hashchange", announce);
