"""A judge over HTTP, as a process: it returns a hundredth of the number that it is sent.

Usage: judge_server.py PORT
"""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS_PER_VERDICT = 0.05


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        number = int(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(SECONDS_PER_VERDICT)
        body = str(number / 100).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    print("ready", flush=True)
    server.serve_forever()
