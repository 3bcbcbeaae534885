"""vLLM's `vllm bench serve` as it is. The command of its CPU build fails: it asks for a package named vllm."""

# pyright: reportMissingImports=false

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
