"""Checkpoints that transformers writes, served from disk: the answer over HTTP is transformers' own MoE block's."""

from pathlib import Path

import httpx
import pytest
import torch

from checkpoints import FAMILY_CONFIGS, HIDDEN, moe_block, router_of, write_checkpoint
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.engine import LayerBatch
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from oracle import assert_close_to_truth, frobenius_error, torch_bf16_layer
from running_service import listening


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_served_from_disk(model_type: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / model_type, model_type)
    settings = Settings.read(checkpoint=tmp_path / model_type, device="cpu")
    checkpoint = open_checkpoint(tmp_path / model_type)
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    with listening(open_service(settings)) as url, httpx.Client(base_url=url) as client:
        told = client.get("/v1/layers").json()
        assert (told["model"], told["model_type"]) == (model_type, model_type)
        assert [layer["layer"] for layer in told["layers"]] == list(checkpoint.model.layers)
        for index, spec in checkpoint.model.layers.items():
            block = moe_block(model, index).double()
            with torch.no_grad():
                truth = block(hidden.double()[None])[0]
                logits, weights, ids = router_of(block)(hidden.double())
            baseline = torch_bf16_layer(
                spec, checkpoint.load_layer(index), LayerBatch(layer=index, hidden_states=hidden)
            )
            for routing in (
                {},
                {"router_logits": logits.tolist()},
                {"topk_ids": ids.tolist(), "topk_weights": weights.tolist()},
            ):
                body = {"hidden_states": hidden.tolist(), **routing}
                answer = client.post(f"/v1/layers/{index}/forward", json=body)
                assert answer.status_code == 200, answer.text
                value = torch.tensor(answer.json()["hidden_states"])
                assert frobenius_error(value, truth) < 1e-2
                assert_close_to_truth(value, truth, baseline)
        assert client.post("/v1/layers/99/forward", json=body).status_code == 404
