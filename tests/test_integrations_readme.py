"""``integrations/README.md`` says what is true."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multimodal_cache.integrations.sglang import SchedulerCache

README = Path(__file__).parent.parent / "src/multimodal_cache/integrations/README.md"
TEXT = README.read_text(encoding="utf-8")
CAT, DOG = (
    np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8) for seed in (0, 1)
)


def file_of(pixels: Any, form: str = "PNG") -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


@pytest.fixture
def server() -> dict[str, Any]:
    """What the first block of Python defines."""
    for module in ("fastapi", "httpx", "python_multipart"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    return run_block(0, "server")


def run_block(number: int, name: str) -> dict[str, Any]:
    """Runs a block of Python as it is written, and returns what it defines."""
    code = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)[number]
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(code, str(README), "exec"), namespace)
    return namespace


def ask(server: dict[str, Any], conversation: Callable[[Any], Awaitable[None]]) -> None:
    """Talks to the server while it runs; what it raises, instead of an answer, is raised."""
    import httpx

    async def talk() -> None:
        app = server["app"]
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            await conversation(client)

    asyncio.run(talk())


def upload(client: Any, file: bytes) -> Awaitable[Any]:
    return client.post("/images", files={"image": ("a file", file)})  # type: ignore[no-any-return]


async def counters(client: Any) -> dict[str, Any]:
    answer = await client.get("/stats")
    assert answer.status_code == 200
    shown: dict[str, Any] = answer.json()
    return shown


def test_an_image_that_comes_twice_is_encoded_once(server: dict[str, Any]) -> None:
    decoded = []
    decode = server["decode"]
    server["decode"] = lambda file: decoded.append(file) or decode(file)
    cat, dog = file_of(CAT), file_of(DOG, "JPEG")

    async def conversation(client: Any) -> None:
        for file in (cat, cat, dog, cat):
            answer = await upload(client, file)
            assert (answer.status_code, answer.json()) == (200, {"tokens": 196})
        assert decoded == [cat, dog]
        shown = await counters(client)
        assert shown["hit_rate"] == 0.5
        assert (shown["encoder"]["hits"], shown["encoder"]["encoded"]) == (2, 2)
        assert (shown["cache"]["entries"], shown["cache"]["current_size"]) == (2, 2 * 196 * 384 * 4)

    ask(server, conversation)


def test_an_image_that_comes_from_many_at_once_is_encoded_once(server: dict[str, Any]) -> None:
    async def conversation(client: Any) -> None:
        answers = await asyncio.gather(*(upload(client, file_of(CAT)) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        shown = (await counters(client))["encoder"]
        assert (shown["encoded"], shown["hits"] + shown["coalesced"]) == (1, 7)

    ask(server, conversation)


@pytest.mark.parametrize(
    "file",
    [b"", b"no image", file_of(CAT)[:900], file_of(CAT, "JPEG")[:500]],
    ids=["empty", "text", "half a PNG", "half a JPEG"],
)
def test_a_file_that_is_no_image_is_the_client_s_mistake(
    file: bytes, server: dict[str, Any]
) -> None:
    async def conversation(client: Any) -> None:
        for answer in [
            await upload(client, file),
            await upload(client, file),
            *await asyncio.gather(*(upload(client, file) for _ in range(4))),
        ]:
            assert (answer.status_code, answer.json()) == (422, {"detail": "expected an image"})
        assert (await upload(client, file_of(CAT))).status_code == 200
        shown = await counters(client)
        assert (shown["encoder"]["encoded"], shown["cache"]["entries"]) == (1, 1)

    ask(server, conversation)


def test_a_request_without_a_file_is_the_client_s_mistake(server: dict[str, Any]) -> None:
    async def conversation(client: Any) -> None:
        assert (await client.post("/images")).status_code == 422

    ask(server, conversation)


def test_a_file_that_is_too_large_is_refused(server: dict[str, Any]) -> None:
    file = file_of(CAT)

    async def conversation(client: Any) -> None:
        server["MAX_BYTES"] = len(file)
        assert (await upload(client, file)).status_code == 200
        server["MAX_BYTES"] = len(file) - 1
        answer = await upload(client, file)
        detail = f"expected at most {len(file) - 1} bytes"
        assert (answer.status_code, answer.json()) == (413, {"detail": detail})

    ask(server, conversation)


def test_photographs_are_turned_upright(server: dict[str, Any]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = BytesIO()
    Image.fromarray(np.rot90(CAT)).save(turned, "PNG", exif=exif)
    upright, read = (server["decode"](file) for file in (file_of(CAT), turned.getvalue()))
    assert (upright == read).all()


def test_the_encoder_is_closed_when_the_server_ends(server: dict[str, Any]) -> None:
    async def conversation(client: Any) -> None:
        assert (await upload(client, file_of(CAT))).status_code == 200

    ask(server, conversation)
    with pytest.raises(RuntimeError, match="closed"):
        server["app"].state.encoder([file_of(DOG)])


def test_a_chat_of_transformers_encodes_its_image_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", "5.18", reason="of the extra transformers")
    import tiny_vlms

    model, processor = tiny_vlms.llava_with_processor()
    Image.fromarray(CAT).save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    for auto, made in (
        (transformers.AutoModelForImageTextToText, model),
        (transformers.AutoProcessor, processor),
    ):
        monkeypatch.setattr(auto, "from_pretrained", lambda *_, made=made, **__: made)
    defined = run_block(1, "chat")
    assert [message["role"] for message in defined["chat"]] == ["user", *["user", "assistant"] * 2]
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r"\bhits=1\b", line)
    assert re.search(r"\bencoded=1\b", line)
    with defined["features"]:
        assert model.base_model.get_image_features is defined["features"]
    assert model.generate(**defined["inputs"], max_new_tokens=32)[0].tolist()[-32:] == (
        defined["tokens"].tolist()
    )


def test_the_line_in_the_log_is_as_it_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    SchedulerCache(100 * 2**20)
    assert f"] {caplog.messages[0]}\n" in TEXT


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 400


def test_its_metrics_are_those_that_there_are() -> None:
    pytest.importorskip("prometheus_client", reason="of the extra metrics")
    from multimodal_cache.metrics import PREFIX, CacheCollector

    there = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in CacheCollector(_registry()).describe()
    }
    queries = set(re.findall(rf"\b{PREFIX}\w+", TEXT))
    assert queries <= there
    (rows,) = re.findall(rf"^\| `{PREFIX}\.\.\.`.*?\n\n", TEXT, flags=re.MULTILINE | re.DOTALL)
    listed = {PREFIX + name for row in rows.strip().splitlines()[2:] for name in _names(row)}
    assert [name for name in there - listed if not name.startswith(f"{PREFIX}store_")] == []
    assert listed <= there


def _registry() -> Any:
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


def _names(row: str) -> list[str]:
    return re.findall(r"`(\w+)`", row.split("|")[1])


def test_its_panel_is_json_with_a_query_of_its_own() -> None:
    (panel,) = re.findall(r"^```json\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert "multimodal_cache_hits_total" in json.loads(panel)["targets"][0]["expr"]


def test_its_line_of_the_log_is_one_that_a_scheduler_writes() -> None:
    (line,) = re.findall(r"^multimodal cache: hit rate.*$", TEXT, flags=re.MULTILINE)
    cache = SchedulerCache(1000)
    cache.get_single(1)
    written = str(cache._log.line())

    def without_numbers(text: str) -> str:
        return re.sub(r"[\d,.]*\d", "0", " ".join(text.split()))

    assert without_numbers(line) == without_numbers(written)


def test_what_it_says_of_the_planner_is_so() -> None:
    from multimodal_cache._plan import _parser
    from multimodal_cache.integrations._sglang_watch import TRACE

    assert f"`{TRACE}=" in TEXT
    options = {option for action in _parser()._actions for option in action.option_strings}
    (command,) = re.findall(r"python -m multimodal_cache plan (.*)", TEXT)
    assert {word for word in command.split() if word.startswith("--")} <= options
    for option in ("--seconds-per-mib", "--kv-bytes-per-token", "--skip"):
        assert f"`{option}" in TEXT
        assert option in options


def test_each_file_that_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", TEXT)
    assert links
    for path, anchor in links:
        target = (README.parent / path).resolve() if path else README
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        names = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
        assert anchor in names, (path, anchor)
