// Data source for pages that `agent-loop view` serves.

import { getJson, getPacket } from "./request.js";

export class LiveSource {
  isLive = true;
  omitted = "";

  state() {
    return getJson("api/state");
  }

  config() {
    return getJson("api/config");
  }

  metrics(cursor) {
    return getJson("api/metrics", { cursor });
  }

  table(files) {
    return getPacket("api/table", { files: files.join(",") });
  }

  trajectory({ split, step, id }) {
    return getPacket("api/trajectory", { split, step, id });
  }

  timeline({ split, step }) {
    return getJson("api/timeline", { split, step });
  }

  /** Returns the rows that contain a text, by file. */
  search(text, files) {
    return getJson("api/search", { text, files: files.join(",") });
  }
}
