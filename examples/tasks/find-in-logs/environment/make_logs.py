"""Write the access logs of a week. The numbers come from a generator of its own, so that they are always the same."""

from pathlib import Path

PATHS = ["/api/orders", "/api/orders/items", "/api/users", "/health"]
STATUSES = [200, 200, 200, 200, 201, 404, 500, 503]


def numbers(state=20260314):
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def main():
    folder, draw = Path("/app/logs"), numbers()
    folder.mkdir(parents=True)
    for day in range(9, 16):
        lines = []
        for second in range(0, 86_400, 60):
            second += next(draw) % 60
            path, status = PATHS[next(draw) % len(PATHS)], STATUSES[next(draw) % len(STATUSES)]
            method, took_ms = ("GET", "POST")[next(draw) % 2], 5 + next(draw) % 9000
            time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
            lines.append(f"2026-03-{day:02}T{time} {method} {path} {status} {took_ms}ms\n")
        (folder / f"access-2026-03-{day:02}.log").write_text("".join(lines))


if __name__ == "__main__":
    main()
