"""Options about images in requests."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, inert, option


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaArgs:
    """Images in requests, for models that see."""

    enable_multimodal: bool | None = option(
        None,
        "Load the image encoder of a model that sees, and accept images. Default: on if the checkpoint has the files "
        "of a processor and Pillow is installed (pip install 'penstock[media]'). false: serve the text part only.",
        sglang="off for Llama 4, Gemma 3 and Step 3",
        plan="media.enabled",
    )
    limit_mm_per_prompt: Json = option(
        {},
        'Most images of a request, as a JSON object: {"image": 4}. Default: 64. Videos and audio are not accepted.',
        sglang="no such option, and no limit",
    )
    allowed_local_media_path: str | None = option(
        None,
        "Folder whose files requests may name as images (file:///folder/image.png). Links that lead out of it are "
        "refused. Default: no files.",
        sglang="every file that the server can read",
        plan="media.folder",
    )
    allowed_media_domains: tuple[str, ...] | None = option(
        None,
        "Hosts from which images are fetched: names, or *.example.org for all names below. Private addresses are "
        "refused unless the option names this very address, and redirects are never followed. Default: none, so that "
        "requests must contain their images.",
        sglang="every host",
        empty=True,
    )
    media_fetch_timeout: float = option(
        10.0, "Seconds after which fetching an image fails.", above=0, plan="media.timeout_s"
    )
    max_image_pixels: int = option(
        2**25, "Most pixels of an image. Larger ones are refused before they are decoded.", low=1,
        plan="media.max_pixels",
    )  # fmt: skip
    max_image_bytes: int = option(
        2**25, "Most bytes of an image's file.", low=1, plan="media.max_bytes",
    )  # fmt: skip
    mm_cache_gib: float = option(
        1.0,
        "Host memory in GiB for the vectors of images that were encoded lately. An image in this cache needs no "
        "encoder. 0: none.",
        aliases=("--mm-processor-cache-gb",),
        low=0,
    )
    mm_threads: int = option(
        2, "Threads that decode and process images.", low=1, high=64, plan="media.num_threads",
    )  # fmt: skip
    mm_attention_backend: str | None = option(
        None,
        "Implementation of attention in image encoders. Default: sdpa, torch's own.",
        choices=("sdpa", "fa3", "triton_attn"),
        built=(None, "sdpa"),
        sglang="fa3 on Hopper, triton_attn on other GPUs",
    )
    disable_fast_image_processor: bool = option(
        False,
        "Preprocess images with Pillow instead of torchvision, where the model's processor offers both.",
        plan="media.fast",
        invert=True,
    )
    keep_mm_feature_on_device: bool = inert(
        False,
        "Keep what the processor made of an image on the device.",
        reason="an image is encoded as soon as it is processed, so that only its vectors are kept",
    )
