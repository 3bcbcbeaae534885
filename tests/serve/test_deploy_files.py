"""The files under docs/deploy use existing options and routes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config import Args
from serve.on_ray.application import Scaling
from serve.server.app import ROUTES

DOCS = Path(__file__).parents[2] / "docs"
DEPLOY = DOCS / "deploy"


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def test_unit_starts_the_server_and_lets_it_drain() -> None:
    unit = (DEPLOY / "penstock.service").read_text(encoding="utf-8")
    [command] = re.findall(r"^ExecStart=(.*)$", unit, flags=re.MULTILINE)
    args = Args.parse(shlex.split(command)[1:])
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.MULTILINE)
    assert args.get("api_key_file")
    assert args.get("shutdown_timeout") < int(stop_s)


def test_deployment_has_options_and_routes_that_exist() -> None:
    deployment, budget, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod: Any = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert Args.parse(container["args"]).get("shutdown_timeout") < pod["terminationGracePeriodSeconds"]
    public = {spec.path for spec in ROUTES if spec.scope.name == "PUBLIC"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in public
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_pod_is_asked_for_requests_until_proxies_know_that_it_ends() -> None:
    deployment, *_ = manifests("kubernetes.yaml")
    pod: Any = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    name, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    shutdown_s = Args.parse(container["args"]).get("shutdown_timeout")
    assert name == "sleep"
    assert int(seconds) + shutdown_s < pod["terminationGracePeriodSeconds"]
    [port] = container["ports"]
    assert port["containerPort"] == Args.parse(container["args"]).get("port")


def test_kubernetes_accepts_the_manifests() -> None:
    """Needs the package kubernetes-validate, which no extra installs because it takes 100 MB."""
    validate = pytest.importorskip("kubernetes_validate")
    version = validate.latest_version()
    for manifest in manifests("kubernetes.yaml"):
        validate.validate(manifest, version, strict=True)
    cluster: Any = manifests("kuberay.yaml")[0]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):  # a RayService contains templates of pods
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        validate.validate(pod, version, strict=True)


def test_ray_service_has_options_and_an_application_that_exist() -> None:
    [service] = manifests("kuberay.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))
    scaling = Scaling.of(
        application["args"].pop("replicas"),
        application["args"].pop("target_ongoing_requests"),
        num_cpus=application["args"].pop("num_cpus"),
    )
    args = Args.of(**application["args"])
    cluster: Any = service["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    assert (scaling.low, scaling.high) == (group["minReplicas"], group["maxReplicas"])
    assert scaling.num_cpus <= int(worker["resources"]["requests"]["cpu"])
    assert args.get("shutdown_timeout") < group["template"]["spec"]["terminationGracePeriodSeconds"]
    [head] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert config["http_options"]["port"] in {port["containerPort"] for port in head["ports"]}


def test_grafana_finds_its_dashboard_and_prometheus() -> None:
    stack = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    contents = {name: yaml.safe_load(config["content"]) for name, config in stack["configs"].items()}
    [provider] = contents["dashboards"]["providers"]
    volumes = dict(volume.split(":")[:2] for volume in stack["services"]["grafana"]["volumes"])
    [mounted] = volumes.values()
    assert Path(mounted).parent == Path(provider["options"]["path"])
    json.loads((DEPLOY / next(iter(volumes))).read_text(encoding="utf-8"))
    [source] = contents["datasources"]["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in stack["services"]
    [[target]] = [each["targets"] for job in contents["prometheus"]["scrape_configs"] for each in job["static_configs"]]
    assert target == f"penstock:{Args.parse(stack['services']['penstock']['command']).get('port')}"


def test_image_has_the_folders_of_the_wheel_and_probes_a_route_that_exists() -> None:
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    packages = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for package in packages["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} /source/{package}" in image
        assert f"!{package}" in kept
    [command] = re.findall(r"^ENTRYPOINT (.*)$", image, flags=re.MULTILINE)
    Args.parse(json.loads(command)[1:])
    [path] = re.findall(r"HEALTHCHECK .*:30000(/\w+)'", image)
    assert path in {spec.path for spec in ROUTES}


def test_compose_file_has_options_and_files_that_exist() -> None:
    stack = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = stack["services"]
    args = Args.parse(services["penstock"]["command"])
    assert args.get("enable_metrics")
    assert args.get("shutdown_timeout") < int(services["penstock"]["stop_grace_period"].removesuffix("s"))
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((DEPLOY / path).exists() for path in mounted if path.startswith("../"))
    assert {config["source"] for name in ("prometheus", "grafana") for config in services[name]["configs"]} == set(
        stack["configs"]
    )
    for config in stack["configs"].values():
        assert yaml.safe_load(config["content"])


def test_proxy_marks_what_it_forwards_and_denies_admin_routes() -> None:
    proxy = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    [denied] = re.findall(r"location ~ (\S+) \{\s+deny all;", proxy)
    for spec in ROUTES:
        assert bool(re.search(denied, spec.path)) == (spec.scope.name == "ADMIN" or spec.path == "/metrics"), spec.path
    assert "proxy_set_header X-Forwarded-For" in proxy


def test_index_names_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+)\)", index))
    assert all((DOCS / target).exists() for target in linked)
    pages = {page.name for page in DOCS.glob("*.md")} - {
        "index.md",
        "demo-model.md",
        "models-by-transformers.md",
    }
    assert pages <= linked
