"""Draws the pictures of the pages: `python docs/assets/make_concepts.py` writes the SVG files beside this one.

A picture stands on a light card of its own, so that it can be read on light and dark pages alike.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, SOFT, LINE, CARD = "#1f2440", "#5a6080", "#8a90ad", "#f6f7fc"
PROCESS, ACTOR, PAPER, BOX = "#e4e8fa", "#3f51b5", "#ffffff", "#ffd98a"
CALL, ANSWER = "#3f51b5", "#2e7d32"
FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"


class Picture:
    """Collects the parts of one drawing."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "middle",
             weight: str = "normal", mono: bool = False) -> None:  # fmt: skip
        family = " font-family=\"ui-monospace, 'DejaVu Sans Mono', monospace\"" if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{family}>{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none",
             radius: int = 8, dash: str = "") -> None:  # fmt: skip
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"{dashed}/>'
        )

    def arrow(self, points: list[tuple[float, float]], stroke: str = CALL, dash: str = "", head: bool = True) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        marker = f' marker-end="url(#head-{stroke[1:]})"' if head else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="2"{dashed}{marker}/>')

    def process(self, x: float, y: float, width: float, height: float, name: str) -> None:
        self.rect(x, y, width, height, PROCESS, LINE)
        self.text(x + width / 2, y + 20, name, weight="600")

    def actor(self, x: float, y: float, name: str, width: float = 96) -> None:
        self.rect(x, y, width, 34, ACTOR, radius=17)
        self.text(x + width / 2, y + 22, name, fill="#ffffff", weight="600")

    def mailbox(self, x: float, y: float, waiting: int = 2, places: int = 3) -> None:
        for i in range(places):
            self.rect(x + 18 * i, y, 15, 20, BOX if i < waiting else PAPER, LINE, 3)

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="head-{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
            for color in (CALL, ANSWER, LINE)
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}" font-family="{escape(FONT)}">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="12" fill="{CARD}"/>\n{body}\n</svg>\n'
        )


def front() -> Picture:
    p = Picture(760, 250, "A driver calls the group of four samplers, each in a process of its own")
    p.process(24, 70, 170, 110, "driver:0")
    p.actor(61, 112, "Driver")
    for i in range(4):
        y = 16 + 56 * i
        p.rect(500, y, 236, 46, PROCESS, LINE)
        p.text(512, y + 28, f"sampler:{i}", anchor="start", weight="600")
        p.mailbox(592, y + 13, 1)
        p.actor(652, y + 6, "Sampler", 78)
        p.arrow([(194, 118), (330, 118), (440, y + 18), (494, y + 18)])
        p.arrow([(500, y + 30), (440, y + 30), (330, 134), (200, 134)], ANSWER, "5 4")
    p.text(272, 106, "estimate(1_000_000)", 11, CALL, mono=True)
    p.text(262, 154, "four results", 12, ANSWER)
    return p


def world() -> Picture:
    p = Picture(760, 270, "A world of three workers on two hosts; workers host actors")
    p.rect(20, 20, 474, 230, "none", LINE, 12, "6 5")
    p.text(36, 42, "one host", 12, SOFT, "start")
    p.rect(514, 20, 226, 230, "none", LINE, 12, "6 5")
    p.text(530, 42, "another host", 12, SOFT, "start")
    p.process(40, 60, 200, 170, "trainer:0")
    p.actor(92, 98, "Trainer")
    p.text(140, 152, "the actor of its role", 11, SOFT)
    p.text(140, 186, "an executor and other actors", 11, SOFT)
    p.text(140, 202, "of the library itself", 11, SOFT)
    p.process(274, 60, 200, 170, "trainer:1")
    p.actor(326, 98, "Trainer")
    p.actor(326, 164, "Cache")
    p.text(374, 216, "one that was spawned there", 11, SOFT)
    p.process(528, 60, 200, 170, "server:0")
    p.actor(580, 98, "Server")
    p.rect(592, 164, 72, 34, PAPER, LINE, 6)
    p.text(628, 185, "table", 12)
    p.text(628, 216, "any object: by reference", 11, SOFT)
    return p


def call() -> Picture:
    p = Picture(760, 330, "The four ways to call")
    p.text(150, 32, "caller", weight="600")
    p.text(610, 32, "callee", weight="600")
    for x in (150, 610):
        p.arrow([(x, 42), (x, 316)], LINE, "3 4", False)
    rows = [
        ("rpc_sync", "waits, and has the result", True, True),
        ("rpc_async", "goes on, and has a Future of the result", False, True),
        ("remote", "goes on, and has a reference: the result stays there", False, False),
        ("tell", "goes on: nothing comes back", False, False),
    ]
    for i, (verb, what, waits, answers) in enumerate(rows):
        y = 66 + 66 * i
        p.text(136, y + 5, verb, 13, INK, "end", "600", True)
        if waits:
            p.rect(145, y, 10, 34, BOX, LINE, 2)
        p.rect(605, y + 6, 10, 24, ACTOR, "none", 2)
        p.arrow([(158, y), (602, y + 8)])
        p.text(380, y - 3, what, 12, SOFT)
        if answers:
            p.arrow([(602, y + 28), (158, y + 36)], ANSWER, "5 4")
        if verb == "remote":
            p.rect(624, y + 4, 84, 26, PAPER, LINE, 6)
            p.text(666, y + 21, "the result", 12)
    return p


def reference() -> Picture:
    p = Picture(760, 250, "An object on its owner, and references to it on two other workers")
    p.process(40, 30, 200, 100, "worker 0")
    p.rect(70, 72, 140, 34, PAPER, CALL, 17)
    p.text(140, 94, "RRef", 13, mono=True)
    p.process(40, 146, 200, 90, "worker 2")
    p.rect(70, 186, 140, 34, PAPER, CALL, 17)
    p.text(140, 208, "RRef", 13, mono=True)
    p.process(500, 60, 220, 150, "worker 1, the owner")
    p.rect(545, 108, 130, 44, ACTOR, radius=10)
    p.text(610, 135, "the object", 13, "#ffffff", weight="600")
    p.text(610, 178, "held by 2", 12, SOFT)
    p.arrow([(210, 89), (540, 122)])
    p.arrow([(210, 203), (540, 140)])
    p.arrow([(84, 106), (84, 182)], ANSWER, "5 4")
    p.text(256, 124, "passed on, as an argument", 12, ANSWER, "start")
    p.text(372, 84, "methods, to_here()", 12, CALL)
    return p


def mailbox() -> Picture:
    p = Picture(760, 260, "A mailbox: one message at a time, in each sender's order")
    p.process(24, 30, 150, 84, "observer:0")
    p.text(99, 84, "1, then 2", 13, mono=True)
    p.process(24, 146, 150, 84, "observer:1")
    p.text(99, 200, "a, then b", 13, mono=True)
    p.process(330, 40, 400, 180, "agent:0")
    for i, (name, color) in enumerate([("b", BOX), ("2", BOX), ("a", BOX)]):
        p.rect(356 + 46 * i, 104, 40, 44, color, LINE, 6)
        p.text(376 + 46 * i, 131, name, 15, mono=True)
    p.text(424, 172, "waiting", 12, SOFT)
    p.arrow([(496, 126), (546, 126)])
    p.rect(552, 92, 150, 68, ACTOR, radius=16)
    p.text(627, 120, "Agent", 13, "#ffffff", weight="600")
    p.text(627, 142, "is at 1", 13, "#ffffff")
    p.text(627, 184, "no other message runs", 12, SOFT)
    p.text(627, 200, "until this one is done", 12, SOFT)
    p.arrow([(174, 76), (270, 76), (348, 116)])
    p.arrow([(174, 188), (270, 188), (348, 138)])
    return p


def chain() -> Picture:
    p = Picture(760, 230, "A handler that waits lets in the messages of its own call chain only")
    p.process(40, 40, 220, 150, "actor A")
    p.rect(70, 80, 160, 36, ACTOR, radius=10)
    p.text(150, 103, "train() waits for B", 13, "#ffffff")
    p.rect(70, 134, 160, 36, PAPER, ANSWER, 10)
    p.text(150, 157, "report() is let in", 13, ANSWER)
    p.process(500, 40, 220, 150, "actor B")
    p.rect(530, 96, 160, 44, ACTOR, radius=10)
    p.text(610, 123, "work() calls back", 13, "#ffffff")
    p.arrow([(230, 96), (526, 108)])
    p.arrow([(526, 132), (234, 152)], ANSWER)
    p.text(378, 88, "1  rpc_sync().work()", 12, CALL, mono=True)
    p.text(378, 168, "2  rpc_sync().report()", 12, ANSWER, mono=True)
    p.rect(300, 196, 160, 24, BOX, LINE, 4)
    p.text(380, 212, "messages of others wait", 12)
    return p


def group() -> Picture:
    p = Picture(760, 250, "A call of a group goes to all members; results come in the members' order")
    p.process(30, 74, 150, 90, "caller")
    p.rect(52, 106, 106, 36, PAPER, CALL, 8)
    p.text(105, 129, "Group of 3", 12)
    for i, result in enumerate(["x", "y", "z"]):
        y = 22 + 74 * i
        p.process(430, y, 150, 60, f"observer:{i}")
        p.text(505, y + 44, f"returns {result}", 12, SOFT, mono=True)
        p.arrow([(180, 112), (300, 112), (426, y + 24)])
        p.arrow([(580, y + 34), (640, y + 34), (664, 124)], ANSWER, "5 4", i == 1)
    p.text(712, 129, "[x, y, z]", 13, ANSWER, mono=True)
    p.text(240, 102, "play()", 12, CALL, mono=True)
    return p


def context() -> Picture:
    p = Picture(760, 300, "An autograd context: recorded on the way, gradients kept where the leaves are")
    p.process(30, 30, 300, 240, "trainer:0")
    p.process(450, 30, 280, 240, "server:0")
    p.rect(60, 66, 110, 34, PAPER, LINE, 6)
    p.text(115, 88, "words")
    p.rect(60, 186, 110, 34, PAPER, LINE, 6)
    p.text(115, 208, "loss")
    p.rect(190, 186, 110, 34, ACTOR, radius=8)
    p.text(245, 208, "head", fill="#ffffff")
    p.rect(530, 126, 120, 40, ACTOR, radius=8)
    p.text(590, 151, "embedding", fill="#ffffff")
    p.arrow([(170, 83), (590, 83), (590, 122)])
    p.arrow([(560, 166), (560, 196), (304, 196)])
    p.arrow([(190, 196), (174, 196)])
    p.arrow([(170, 212), (188, 212)], ANSWER, "5 4")
    p.arrow([(300, 212), (620, 212), (620, 170)], ANSWER, "5 4")
    p.text(390, 76, "forward: recorded", 12, CALL)
    p.text(390, 232, "backward", 12, ANSWER)
    p.text(180, 256, "context 7: gradients of head", 12, SOFT)
    p.text(590, 256, "context 7: gradients of embedding", 12, SOFT)
    return p


def agent() -> Picture:
    p = Picture(680, 230, "Three observers ask the agent for actions, and tell it their rewards")
    for i in range(3):
        y = 16 + 70 * i
        p.process(24, y, 190, 60, f"observer:{i}")
        p.text(119, y + 44, "an environment", 12, SOFT)
        p.arrow([(214, y + 22), (300, y + 22), (412, 96)])
        p.arrow([(418, 108), (310, y + 34), (220, y + 34)], ANSWER, "5 4")
    p.process(420, 44, 236, 144, "agent:0")
    p.mailbox(440, 96, 2)
    p.actor(520, 89, "the policy", 112)
    p.text(538, 156, "one message at a time", 12, SOFT)
    p.text(330, 24, "states, rewards", 12, CALL)
    p.text(330, 216, "actions", 12, ANSWER)
    return p


def server() -> Picture:
    p = Picture(720, 240, "Two trainers use one table on a server, forward and backward")
    for i in range(2):
        y = 24 + 104 * i
        p.process(24, y, 230, 88, f"trainer:{i}")
        p.actor(48, y + 38, "a head", 86)
        p.rect(150, y + 38, 84, 34, PAPER, LINE, 6)
        p.text(192, y + 60, "its context", 12)
        p.arrow([(254, y + 34), (360, y + 34), (468, 104)])
        p.arrow([(474, 124), (366, y + 60), (260, y + 60)], ANSWER, "5 4")
    p.process(474, 50, 222, 140, "server:0")
    p.actor(520, 92, "the table", 130)
    p.text(585, 156, "gradients by context", 12, SOFT)
    p.text(372, 28, "words, and gradients back", 12, CALL)
    p.text(372, 222, "embeddings", 12, ANSWER)
    return p


PICTURES = {
    draw.__name__: draw for draw in (front, world, call, reference, mailbox, chain, group, context, agent, server)
}


def main() -> None:
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
