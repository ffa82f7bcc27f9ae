"""Pipelines are found by name."""

from types import SimpleNamespace

import pytest
from mmgrpo.pipelines.base import PipelineError, load_pipeline, pipelines


def test_names_are_the_modules_that_build_a_pipeline():
    assert "image" in pipelines()
    assert not {"base", "digits_world", "digits_model", "pretrain", "__init__"} & set(pipelines())


def test_an_unknown_name_gets_the_nearest():
    config = SimpleNamespace(pipeline=SimpleNamespace(name="imag", options={}), policy={})
    with pytest.raises(PipelineError, match="unknown pipeline 'imag'; did you mean 'image'"):
        load_pipeline(config)
