"""Domains: one thin module each for data, prompts, decoding and what to score."""

if __name__ != "mmgrpo.pipelines":
    raise ImportError(
        f"this is mmgrpo.pipelines: write 'import mmgrpo.pipelines', not 'import {__name__}' "
        "(your own module of this name is hidden when Python runs from the top of the mmgrpo checkout)"
    )
