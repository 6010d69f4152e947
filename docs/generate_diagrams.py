"""Draw the diagrams of the documentation: `python docs/generate_diagrams.py`.

Each has its own light background, so that it can be read on light and dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "images"
COLOURS = {
    "plain": "#ffffff",
    "yours": "#fde8c8",
    "model": "#d3f0d3",
    "tool": "#d6e4fb",
    "prompt": "#e8e8ec",
    "train": "#eadcf8",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c1e21; }
.small { font-size: 11.5px; fill: #51545c; }
.code { font: 12px ui-monospace, monospace; }
.bold { font-weight: 600; }
rect.box { stroke: #6b6f7a; }
path.line { stroke: #51545c; stroke-width: 1.4; fill: none; marker-end: url(#arrow); }
"""
ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#51545c"/></marker>'
)


class Drawing:
    """Drawing of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, *, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{ARROW}</defs>"
            f'<rect width="{width}" height="{height}" rx="8" fill="#f8f9fb"/>'
        )
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, text: str, *, height: float = 34, kind: str = "plain"
    ) -> None:
        """Draw a box with a centred text; lines are separated by newlines."""
        self._parts.append(
            f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{COLOURS[kind]}"/>'
        )
        lines = text.split("\n")
        for index, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 16 * (index - (len(lines) - 1) / 2)
            self.text(
                x + width / 2, middle, line, anchor="middle", style="small" if index else "bold" * bool(line)
            )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", style: str = "small") -> None:
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        way = " L".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#arrow)"' if both else ""
        self._parts.append(f'<path class="line" d="M{way}"{start}/>')

    def save(self, name: str) -> None:
        text = "\n".join([self._head, *self._parts, "</svg>"])
        (FOLDER / f"{name}.svg").write_text(text + "\n", encoding="utf-8")


def draw_flow() -> None:
    drawing = Drawing(
        860, 300, title="The flow of a step: rows, loops, episodes, rewards, batch, trainer, weights"
    )
    names = [
        (20, 80, "row", "yours"),
        (130, 120, "agent loop", "yours"),
        (280, 120, "episode", "plain"),
        (430, 120, "output", "plain"),
        (580, 100, "reward", "yours"),
        (710, 130, "batch", "train"),
    ]
    for (x, width, text, kind), following in zip(names, [*names[1:], None], strict=True):
        drawing.box(x, 40, width, text, kind=kind)
        if following:
            drawing.arrow((x + width, 57), (following[0] - 2, 57))
    drawing.text(440, 94, "token ids, mask, log-probs")
    drawing.box(130, 130, 120, "chat template\nmessages to ids", height=46)
    drawing.box(280, 130, 120, "servers\ncompletions", height=46, kind="model")
    drawing.box(420, 130, 140, "tools, interaction\nreplies", height=46, kind="yours")
    for x in (190, 340, 490):
        drawing.arrow((340 + (x - 340) * 0.25, 75), (x, 128), both=True)
    drawing.box(710, 130, 130, "trainer\nadvantages, loss", height=46, kind="train")
    drawing.arrow((775, 74), (775, 128))
    drawing.arrow((775, 176), (775, 222), (340, 222), (340, 178))
    drawing.text(558, 215, "new weights, with their version", anchor="middle")
    drawing.box(20, 256, 22, "", height=16, kind="yours")
    drawing.text(50, 269, "you write it")
    drawing.box(150, 256, 22, "", height=16, kind="model")
    drawing.text(180, 269, "an engine: embedded, vLLM, SGLang, or your own")
    drawing.save("flow")


def draw_architecture() -> None:
    drawing = Drawing(930, 300, title="Classes of a training step, and the files that hold them")
    across = [
        ("PPOTrainer\ntraining/ppo_trainer.py", "train"),
        ("AgentLoopManager\nrollout/manager.py", "plain"),
        ("AgentLoopWorker\nrollout/worker.py", "plain"),
        ("AgentLoop.run\nloops/", "yours"),
        ("Episode\nepisode/episode.py", "plain"),
    ]
    for index, (text, kind) in enumerate(across):
        drawing.box(20 + 180 * index, 35, 150, text, height=46, kind=kind)
        if index:
            drawing.arrow((180 * index - 10, 58), (180 * index + 18, 58))
    for index, text in enumerate(["rows", "jobs", "one task each", "turns"]):
        drawing.text(185 + 180 * index, 26, text, anchor="middle")
    drawing.box(20, 130, 150, "Learner\ntraining/learner.py", height=46, kind="train")
    drawing.box(380, 130, 150, "reward\nrewards/", height=46, kind="yours")
    drawing.box(560, 130, 150, "ChatTemplate\nchat/template.py", height=46)
    drawing.box(740, 130, 150, "tools, interactions\ntools/, interactions/", height=46, kind="yours")
    drawing.box(20, 225, 150, "weight transfer\nweights/", height=46, kind="train")
    drawing.box(260, 225, 150, "server\nservers/vllm, ...", height=46, kind="model")
    drawing.box(470, 225, 150, "ServerPool\nservers/pool.py", height=46)
    drawing.box(690, 225, 200, "AsyncLLMServerManager\nservers/manager.py", height=46)
    drawing.arrow((95, 81), (95, 128))
    drawing.arrow((95, 176), (95, 223))
    drawing.arrow((170, 248), (258, 248))
    drawing.text(214, 240, "new weights", anchor="middle")
    drawing.arrow((455, 81), (455, 128))
    drawing.arrow((770, 81), (640, 128))
    drawing.arrow((815, 81), (815, 128))
    drawing.arrow((890, 58), (910, 58), (910, 248), (892, 248))
    drawing.arrow((690, 248), (622, 248))
    drawing.text(655, 240, "lease", anchor="middle")
    drawing.arrow((470, 248), (412, 248))
    drawing.text(440, 240, "request", anchor="middle")
    drawing.save("architecture")


def draw_states() -> None:
    drawing = Drawing(
        850, 270, title="States of the tool loop: pending, generating, tools, interaction, terminated"
    )
    drawing.box(20, 105, 120, "PENDING\nthe prompt", height=46)
    drawing.box(230, 105, 150, "GENERATING\none model turn", height=46, kind="model")
    drawing.box(470, 25, 170, "PROCESSING_TOOLS\ncalls of the turn", height=46, kind="tool")
    drawing.box(470, 185, 170, "INTERACTING\nsomebody replies", height=46, kind="tool")
    drawing.box(660, 105, 120, "TERMINATED\na stop reason", height=46)
    drawing.arrow((140, 128), (228, 128))
    drawing.text(184, 120, "it fits", anchor="middle")
    drawing.arrow((330, 105), (330, 48), (468, 48))
    drawing.text(398, 41, "calls", anchor="middle")
    drawing.arrow((500, 71), (500, 118), (382, 118))
    drawing.text(448, 112, "results", anchor="middle")
    drawing.arrow((330, 151), (330, 208), (468, 208))
    drawing.text(398, 225, "no calls", anchor="middle")
    drawing.arrow((500, 185), (500, 140), (382, 140))
    drawing.text(448, 155, "a reply", anchor="middle")
    drawing.arrow((380, 129), (658, 129))
    drawing.text(585, 122, "answered, or a limit", anchor="middle")
    drawing.arrow((640, 48), (720, 48), (720, 103))
    drawing.text(728, 75, "a tool ends it")
    drawing.arrow((640, 208), (720, 208), (720, 153))
    drawing.text(728, 190, "it is over")
    drawing.text(20, 255, "From every state: deadline, cancelled, failed. The tokens so far are kept.")
    drawing.save("states")


TOKENS = [
    ("prompt", 150, "Which shelf holds", "order 9466? <turn>"),
    ("model", 150, "part_of_order(9466)", "<end of turn>"),
    ("tool", 120, "part 17", "<turn>"),
    ("model", 150, "shelf_of_part(17)", "<end of turn>"),
    ("tool", 120, "42", "<turn>"),
    ("model", 120, "Shelf 42.", "<end of turn>"),
]


def draw_tokens() -> None:
    drawing = Drawing(
        940, 275, title="Tokens of a trajectory by segment, with their mask, log-probs and weight versions"
    )
    x = 110.0
    for label, y in (
        ("origin", 45),
        ("tokens", 82),
        ("mask", 139),
        ("log-probs", 172),
        ("version", 205),
    ):
        drawing.text(20, y + 8, label, style="bold")
    version = 7
    for index, (origin, width, first, second) in enumerate(TOKENS):
        is_model = origin == "model"
        drawing.text(x + width / 2, 50, origin, anchor="middle")
        drawing.box(x, 62, width, "", height=48, kind=origin)
        drawing.text(x + width / 2, 83, first, anchor="middle", style="code")
        drawing.text(x + width / 2, 101, second, anchor="middle", style="code")
        drawing.box(
            x,
            130,
            width,
            "1 1 1 ... 1" if is_model else "0 0 0 ... 0",
            height=26,
            kind="model" if is_model else "plain",
        )
        drawing.text(x + width / 2, 181, "-0.02 -0.31 ..." if is_model else "", anchor="middle", style="code")
        if is_model:
            version = 7 if index < 4 else 8
            drawing.text(x + width / 2, 214, str(version), anchor="middle", style="code")
        x += width
    drawing.arrow((110, 240), (258, 240), both=True)
    drawing.text(184, 257, "prompt_ids", anchor="middle", style="code")
    drawing.arrow((262, 240), (918, 240), both=True)
    drawing.text(590, 257, "response_ids, response_mask", anchor="middle", style="code")
    drawing.text(20, 24, "Only tokens that the model sampled are trained: mask 1.")
    drawing.save("tokens")


def draw_time() -> None:
    drawing = Drawing(
        860, 300, title="Synchronous and asynchronous training in time: rollouts and updates by step"
    )
    scale, left = 32, 150

    def bar(y: float, start: float, end: float, text: str, kind: str) -> None:
        drawing.box(left + start * scale, y, (end - start) * scale - 2, text, height=26, kind=kind)

    drawing.text(20, 28, "mode: sync", style="bold")
    drawing.text(20, 62, "servers")
    drawing.text(20, 94, "trainer")
    for step in range(3):
        bar(44, 8 * step, min(8 * step + 5, 21), f"rollout {step + 1}", "model")
        if 8 * step + 8 <= 21:
            bar(76, 8 * step + 5, 8 * step + 8, f"update {step + 1}", "train")
    drawing.text(20, 146, "mode: async", style="bold")
    drawing.text(20, 163, "max_staleness: 1")
    for y, label in ((192, "servers"), (224, ""), (256, "trainer")):
        drawing.text(20, y, label)
    for y, start, end, step in (
        (174, 0, 5, 1),
        (206, 0, 8, 2),
        (174, 8, 13, 3),
        (206, 11, 16, 4),
        (174, 16, 21, 5),
    ):
        bar(y, start, end, f"rollout {step}", "model")
    for step, start in enumerate((5, 8, 13, 16), start=1):
        bar(238, start, start + 3, f"update {step}", "train")
    drawing.text(
        left, 288, "time, schematic: a rollout may start as soon as the weights are at most one version old"
    )
    drawing.arrow((left + 530, 284), (left + 672, 284))
    drawing.save("sync_async")


if __name__ == "__main__":
    draw_flow()
    draw_architecture()
    draw_states()
    draw_tokens()
    draw_time()
