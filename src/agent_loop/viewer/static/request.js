// Requests to the server of the page.

import { decodePacket } from "./packets.js";

export async function getJson(path, parameters) {
  return (await reply(path, parameters)).json();
}

export async function getPacket(path, parameters) {
  return decodePacket(await (await reply(path, parameters)).arrayBuffer());
}

async function reply(path, parameters) {
  const found = await fetch(`${path}?${new URLSearchParams(parameters)}`);
  if (!found.ok) {
    const body = await found.json().catch(() => null);
    throw new Error(body?.error ?? `the server returned status ${found.status}`);
  }
  return found;
}
