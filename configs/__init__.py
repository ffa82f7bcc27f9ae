"""Ready-made runs: one YAML file each."""

if __name__ != "mmgrpo.configs":
    raise ImportError(
        f"this is mmgrpo.configs: write 'import mmgrpo.configs', not 'import {__name__}' "
        "(your own module of this name is hidden when Python runs from the top of the mmgrpo checkout)"
    )
