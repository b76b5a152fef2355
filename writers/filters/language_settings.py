"""Settings of the `language` filter."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from shardkit.writers.filters.settings import FilterSettings, Ratio

__all__ = ["LANGUAGES", "LanguageConfig"]

# Of lid.176: ISO 639-1 where there is a code, else 639-3 or Wikipedia's own.
_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co "
    "cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi "
    "hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li "
    "lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no "
    "oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su "
    "sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(_CODES.split())


class LanguageConfig(FilterSettings):
    """Which languages stay, and how sure fastText's lid.176 must be of them."""

    languages: tuple[str, ...] | None = Field(
        default=None, strict=False, description="Codes such as en; null: all 176."
    )
    threshold: Ratio | Annotated[dict[str, Ratio], Field(min_length=1)] = Field(
        default=0.65, description="Documents whose score is not above it go; one number, or one per language."
    )
    characters: int | None = Field(
        default=None, ge=1, description="Look at so many characters from the beginning; null: at all."
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        thresholds = self.threshold if isinstance(self.threshold, dict) else {}
        if self.languages is not None and not self.languages:
            raise ValueError("languages is empty, so nothing would stay; name one, or null for all")
        unknown = sorted({*(self.languages or ()), *thresholds} - LANGUAGES)
        if unknown:
            raise ValueError(
                f"lid.176 has no language {', '.join(unknown)}; its codes are {', '.join(sorted(LANGUAGES))}"
            )
        missing = sorted(set(self.languages or LANGUAGES) - set(thresholds))
        if thresholds and missing:
            raise ValueError(f"threshold lacks {', '.join(missing)}; give one to each language that stays")
        return self
