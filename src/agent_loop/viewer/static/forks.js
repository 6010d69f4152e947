// Requests for what-if forks: whether the viewer has a server, and the run of a fork.

import { decodePacket } from "./packets.js";
import { Trajectory } from "./trajectory.js";

/**
 * Returns `{problem, token, server}`: why there are no forks, or the secret that the request for a fork needs and a
 * sentence about what continues a fork.
 */
export async function forkState(source) {
  if (!source.isLive) return { problem: "This file has no server, and cannot fork trajectories.", token: null, server: "" };
  const reply = await fetch("api/what-if");
  if (!reply.ok) throw new Error(`the server returned status ${reply.status}`);
  return reply.json();
}

/** Runs a trajectory again up to a turn, with a text as that turn, and returns how it continued. */
export async function runFork({ split, step, id, turn, text }, { token, signal }) {
  const reply = await fetch("api/fork", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Viewer-Token": token },
    body: JSON.stringify({ split, step, id, turn, text }),
    signal,
  });
  if (reply.ok) return new Trajectory(decodePacket(await reply.arrayBuffer()));
  const body = await reply.json().catch(() => null);
  throw new Error(body?.error ?? `the server returned status ${reply.status}`);
}
