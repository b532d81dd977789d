"""Rows for the sampler, without an engine."""

from __future__ import annotations

import torch

from astrai.sampling import Sampler, SamplingParams, SamplingRow
from astrai.sampling.random import stream_key

CPU = torch.device("cpu")


def make_row(prompt=(0,), output=(), seed=0, stop_ids=(), bad_ids=(), **params):
    return SamplingRow(
        SamplingParams(**params),
        list(prompt),
        list(output),
        stream_key(seed, 0),
        tuple(stop_ids),
        tuple(bad_ids),
    )


def sample(logits, rows, vocab_size=None):
    """One step of the sampler over rows; the logits are not changed."""
    logits = torch.as_tensor(logits)
    sampler = Sampler(vocab_size or logits.shape[1])
    return sampler.sample(logits.clone(), sampler.batch_info(rows, CPU)).token_ids


def draws(logits, count, **params):
    """`count` tokens of one request with these logits at every position, as one batch."""
    rows = [make_row(seed=seed, **params) for seed in range(count)]
    return sample(torch.as_tensor(logits).expand(count, -1), rows)


def run_steps(rows, logits):
    """Sample step after step, appending to the rows; returns how often facts were worked out."""
    sampler = Sampler(logits.shape[2])
    info, built = None, 0
    for step_logits in logits:
        fresh = sampler.batch_info(rows, CPU, info)
        built += fresh is not info
        info = fresh
        result = sampler.sample(step_logits.clone(), info)
        for row, token in zip(rows, result.token_ids, strict=True):
            row.output_ids.append(token)
    return built
