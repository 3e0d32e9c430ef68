"""What a peer needs to host one stage: its tensors, its compute thread, its way to the next stage."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.chain.neighbours import Neighbours, router_options
from swarmtrain.codec.samples import SampleStore
from swarmtrain.directory.directory import Directory
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.peer.acquaintance import Acquaintance
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.context import PeerContext
from swarmtrain.peer.coordinator_link import CoordinatorLink
from swarmtrain.peer.jobs import StageJobs
from swarmtrain.peer.options import Fit, PeerOptions
from swarmtrain.route.router import STEALING_POLICIES
from swarmtrain.rpc.node import Node
from swarmtrain.run.manifest import Manifest

MAX_LEDGER_BYTES = 4 << 30


async def build_context(
    stack: contextlib.AsyncExitStack,
    options: PeerOptions,
    incarnation: str,
    manifest: Manifest,
    fit: Fit,
    *,
    link: CoordinatorLink,
    host: NetworkHost,
    node: Node,
    directory: Directory,
) -> PeerContext:
    """Build the stage that `options` name; `stack` ends what was started for it."""
    torch.set_num_threads(options.threads)
    forward_s, backward_s = options.faults.pace_s
    compute = ComputeThread(at_least_s={Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s})
    stack.push_async_callback(compute.stop)
    built = await compute.run(
        Kind.STEP, -1, lambda: StageWorker(StageState(manifest, options.stage, device=options.device))
    )
    dispatcher: Dispatcher | None = None
    if options.stage < manifest.stages.count - 1:
        below = options.stage + 1
        routing = router_options(manifest, below, options.max_up_bytes_per_s)
        neighbours = Neighbours(below, host, node, directory, policy=options.route, options=routing)
        neighbours.start()
        stack.push_async_callback(neighbours.close)
        dispatcher = Dispatcher(node, neighbours)
    ends = {0, manifest.stages.count - 1} if manifest.model.tie_embeddings else set()
    node.look_up = Acquaintance(host, directory, sorted({options.stage} | ends)).meet
    return PeerContext(
        run_id=options.invite.run_id,
        manifest=manifest,
        stage=options.stage,
        incarnation=incarnation,
        node=node,
        compute=compute,
        jobs=StageJobs(
            manifest,
            built.value,
            graph_budget_bytes=fit.graph_budget_bytes,
            make_store=lambda: SampleStore(options.state_dir, options.max_samples_bytes),
        ),
        authority=link,
        dispatcher=dispatcher,
        max_queue=options.max_queue,
        max_ledger_bytes=min(MAX_LEDGER_BYTES, fit.available_bytes // 4),
        faults=replace(options.faults, cut=node.cut),
        shares_work=options.route in STEALING_POLICIES,
    )
