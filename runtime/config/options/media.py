"""Options about images, videos and audio in requests."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, inert, option


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaArgs:
    """Images, videos and audio in requests, for models that see or hear."""

    enable_multimodal: bool | None = option(
        None,
        "Load the encoder of a model that sees or hears, and accept images, videos and audio. Default: on if the "
        "checkpoint has the files of a processor and Pillow is installed (pip install 'penstock[media]'). false: serve "
        "the text part only.",
        sglang="off for Llama 4, Gemma 3 and Step 3",
        plan="media.enabled",
    )
    limit_mm_per_prompt: Json = option(
        {},
        'Most images, videos and audio inputs of a request, as a JSON object: {"image": 4}. Default: {"image": 64, '
        '"video": 4, "audio": 16}.',
        sglang="no such option, and no limit",
    )
    allowed_local_media_path: str | None = option(
        None,
        "Folder whose files requests may name (file:///folder/image.png). Links that lead out of it are "
        "refused. Default: no files.",
        sglang="every file that the server can read",
        plan="media.folder",
    )
    allowed_media_domains: tuple[str, ...] | None = option(
        None,
        "Hosts from which images, videos and audio are fetched: names, or *.example.org for all names below. Private "
        "addresses are refused unless the option names this very address, and redirects are never followed. Default: "
        "none, so that requests must contain them.",
        sglang="every host",
        empty=True,
    )
    media_fetch_timeout: float = option(
        10.0, "Seconds after which fetching an image, a video or audio fails.", above=0, plan="media.timeout_s"
    )
    max_image_pixels: int = option(
        2**25, "Most pixels of an image. Larger ones are refused before they are decoded.", low=1,
        plan="media.max_pixels",
    )  # fmt: skip
    max_image_bytes: int = option(
        2**25, "Most bytes of the file of an image, a video or audio.", aliases=("--max-media-bytes",), low=1,
        plan="media.max_bytes",
    )  # fmt: skip
    max_video_frames: int = option(
        64, "Most frames of a video that the model sees. A file with more is read with fewer frames.", low=1, high=4096,
        plan="media.max_frames",
    )  # fmt: skip
    max_video_pixels: int = option(
        2**26,
        "Most pixels of all frames of a video together, before the model's processor scales them. A file with more is "
        "read with fewer frames.",
        low=1,
        plan="media.max_video_pixels",
    )
    max_audio_seconds: float = option(
        600.0, "Most seconds of audio in one input. The model may allow less.", above=0, plan="media.max_audio_s"
    )
    transcription_model: str | None = option(
        None,
        "A Whisper model for /v1/audio/transcriptions and /v1/audio/translations, beside the served model. "
        "transformers' own model generates, one request at a time. Default: these routes are refused.",
        sglang="the served model itself may be one of Whisper",
        plan="media.transcription_model",
    )
    mm_cache_gib: float = option(
        1.0,
        "Host memory in GiB for the vectors of images, videos and audio that were encoded lately. One in this cache "
        "needs no encoder. 0: none.",
        aliases=("--mm-processor-cache-gb",),
        low=0,
    )
    mm_threads: int | None = option(
        None,
        "Threads that decode and process images, videos and audio. Default: 2, or 1 with fewer than four CPUs, where "
        "a second thread would delay the event loop.",
        low=1,
        high=64,
        plan="media.num_threads",
    )
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
