"""The picture of a tagged graph: well-formed, nothing on top of anything else."""

import xml.etree.ElementTree as ElementTree
from itertools import combinations

from girih.planner.operators import Edge, Operator, OperatorGraph
from girih.planner.tagging.group import Device, HierarchicalGroup
from girih.planner.tagging.tag import tag
from girih.report.picture import BOX, HEIGHT, picture

SVG = "{http://www.w3.org/2000/svg}"


def graph():
    """Thirty operators: an input, 28 layers in seven towers of four, and logits."""
    inputs = Operator(name="input <&>", kind="input", output_bytes_per_example=400, movable=False)
    layers = [
        Operator(
            name=f"tower.{tower}.{layer}", kind="Linear", module=f"tower.{tower}.{layer}", flops_per_example=6e4,
            parameter_bytes=40_000, output_bytes_per_example=400,
        )
        for tower in range(7) for layer in range(4)
    ]  # fmt: skip
    logits = Operator(name="logits", kind="output", movable=False)
    edges = [Edge(producer="input <&>", consumer=f"tower.{t}.0", bytes_per_example=400) for t in range(7)]
    edges += [
        Edge(producer=f"tower.{t}.{n}", consumer=f"tower.{t}.{n + 1}", bytes_per_example=400)
        for t in range(7)
        for n in range(3)
    ]
    edges += [Edge(producer=f"tower.{t}.3", consumer="logits", bytes_per_example=400) for t in range(7)]
    return OperatorGraph(operators=(inputs, *layers, logits), edges=tuple(edges))


def test_thirty_operators_on_three_devices():
    drawn, device = graph(), Device(flops_per_s=1e9, bytes_per_s=1e9)
    tagged = tag(
        drawn, HierarchicalGroup(trainers=2, batch_size=100, trainer=device, servers=(device, device))
    )
    root = ElementTree.fromstring(picture(drawn, tagged))
    lanes = {}
    for rect in root.findall(f"{SVG}rect")[1:]:
        lanes[len(lanes)] = (float(rect.get("x")), float(rect.get("x")) + float(rect.get("width")))
    assert len(lanes) == 3
    boxes = {}
    for group in root.findall(f"{SVG}g"):
        told, rect = group.find(f"{SVG}title").text, group.find(f"{SVG}rect")
        boxes[told.partition(" (")[0]] = (float(rect.get("x")), float(rect.get("y")), told)
    assert set(boxes) == {operator.name for operator in drawn.operators}
    for (x1, y1, _), (x2, y2, _) in combinations(boxes.values(), 2):
        assert abs(x1 - x2) >= BOX or abs(y1 - y2) >= HEIGHT
    numbers = {name: number for number, name in enumerate(tagged.utilization)}
    for name, (x, _, told) in boxes.items():
        first, last = lanes[numbers[tagged.tagging[name]]]
        assert first <= x <= last - BOX
        assert tagged.reasons[name] in told
    for edge in drawn.edges:
        assert boxes[edge.producer][1] < boxes[edge.consumer][1]
    assert len(root.findall(f"{SVG}path")) == len(drawn.edges)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert width < 2600
    assert height < 700
    texts = [each.text for each in root.findall(f"{SVG}text")]
    assert texts[::2] == list(tagged.utilization)
    assert all(text.startswith("CPU ") for text in texts[1::2])
