"""`shardkit plan`: the worked example on stdout, and every assumption named."""

from __future__ import annotations

import json
import re

import pytest

from shardkit.cli.main import main

EXAMPLE = ["plan", "train", "--tokens", "14.8e12", "--days", "54", "--gpus", "2048"]
FUNNEL = [
    word
    for name, share in zip("abcdefg", ["0.5", "0.4", "0.5", "0.5", "0.5", "0.4", "95%"], strict=True)
    for word in ("--retention", f"{name}={share}")
]


def test_a_run_s_plan_shows_rates_in_total_per_node_and_per_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--bytes-per-token", "4"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"tokens/s +3,172,154 +12,391 +1,549\n", out)
    assert re.search(r"bytes/s used +12\.7 MB/s +49\.6 KB/s +6\.2 KB/s\n", out)
    assert re.search(r"given +--bytes-per-token +4 ", out)
    assert re.search(r"assumed +--latency +50 ms ", out)
    assert "lanes for" not in err
    assert main([*EXAMPLE, "--lanes", "64"]) == 0
    _, err = capfd.readouterr()
    assert "64 lanes for 256 nodes: each byte of the dataset is fetched by 4 nodes" in err
    assert "--lanes 256 gives each node lanes of its own" in err


def test_a_slow_loader_is_said_in_days_and_dollars(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--measured", "6195.613", "--price", "gpu_hour=2"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"duration +108 days", out)
    assert re.search(r"GPUs +\$10,616,83[12] +for 108 days", out)
    assert "a node needs 12,391 tokens/s and gets 6,196, so 54 days become 108 days" in err
    assert "and cost $5,308,41" in err
    assert main([*EXAMPLE, "--measured", "1e6"]) == 0
    out, err = capfd.readouterr()
    assert "GPUs " not in out.split("From")[0].split("Store")[1]
    assert "too slow" not in err


def test_its_json_has_plain_numbers_and_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--lanes", "256", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fetch_factor"] == 1
    assert plan["notes"] == []
    assert plan["inputs"]["lanes"] == {"value": 256, "origin": "given"}
    assert main(["plan", "--json", *EXAMPLE[1:], "--lanes", "256"]) == 0
    assert json.loads(capsys.readouterr().out) == plan


def test_a_build_s_plan_shows_the_funnel_and_the_cores(capfd: pytest.CaptureFixture[str]) -> None:
    needs = ["plan", "build", "--tokens", "14.8T", *FUNNEL, "--speed", "10MB/s/core"]
    assert main([*needs, "--memory", "100MB"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "at most 1,048,576 are possible: set `memory` to 200 MB or more" in err
    assert main([*needs, "--split-bytes", "10e9"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"all stages +0\.95% +6\.23 PB +59\.2 TB\n", out)
    assert re.search(r"cores +516 +for 14 days at 10 MB/s/core; takes 14 days\n", out)


def test_raw_text_and_tokens_are_each_other_s_inverse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "build", "--tokens", "2e9", *FUNNEL, "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)["raw_bytes"]
    assert main(["plan", "build", "--raw", str(round(raw)), *FUNNEL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == pytest.approx(2e9)


@pytest.mark.parametrize("kind", ["train", "build"])
def test_help_states_every_default(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", kind, "--help"])
    assert caught.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out.split("options:")[1])
    options = set(re.findall(r" --([a-z-]+)", text)) - {"help", "tokens", "days", "gpus", "raw"}
    assert text.count("default") >= len(options) - 6  # the store's pairs and mentions in other helps
