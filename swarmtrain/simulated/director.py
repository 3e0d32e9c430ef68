"""Executes a schedule: waits for each fault's time, injects it, undoes it, and makes sure that the run can end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from swarmtrain.chain.rebalancing import MoveRules, RebalanceRule
from swarmtrain.peer.identity import CONTACT_S
from swarmtrain.simulated.judge import excesses
from swarmtrain.simulated.loop import Deadlock
from swarmtrain.simulated.schedule import Fault, Schedule
from swarmtrain.simulated.swarm import Life, SimulatedSwarm, told
from swarmtrain.simulated.watchdog import Endless, watched

POLL_S = 0.02
PATIENCE_S = 40.0  # a fault waits no longer for its step: an earlier fault may have stopped the run
RESTART_S = 1.0  # after this time an operator restarts daemons that have ended
FLIP_S = 2.0  # duration of a fault that flips bits of data in flight
LEAVE_S = 150.0  # after that, all daemons must end within this time
SETTLE_S = 400.0  # virtual seconds in which the run must end after the last fault


class Director:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule, root: Path, trace: Callable[[str], None] | None = None) -> None:
        self.schedule = schedule
        self.swarm = SimulatedSwarm(schedule.manifest(), seed=str(schedule.seed), root=root, trace=trace)
        self._newcomers = itertools.count(schedule.num_peers)
        self._wanted: dict[str, bool] = {}  # daemons that are started again when they end
        self._undo: list[Callable[[], None]] = []
        self.happened: list[str] = []  # faults that were really injected

    def run(self) -> None:
        """Run to the end, or until it is clear that the run will not end."""
        swarm = self.swarm
        swarm.network.default.delay_s = self.schedule.delay_s
        swarm.start_coordinator(min_peers=self.schedule.num_peers, moves=self._rules())
        self._wanted["coordinator"] = True
        for index in range(self.schedule.num_peers):
            self._start_peer(f"peer{index}", index % swarm.manifest.stages.count, speed=self.schedule.speeds[index])
        faults = swarm.loop.create_task(self._faults(), context=swarm.network.context.copy())
        keeper = swarm.loop.create_task(self._keep(), context=swarm.network.context.copy())
        for task in (faults, keeper):
            task.add_done_callback(self._helper_ended)
        limit_s = SETTLE_S + sum(fault.length_s + fault.delay_s + PATIENCE_S for fault in self.schedule.faults)
        try:
            with watched(swarm.loop.time):
                swarm.loop.run_until(lambda: faults.done() or swarm.is_over, limit_s=limit_s)
                if not swarm.is_over:
                    self._heal()
                    swarm.loop.run_until(lambda: swarm.is_over, limit_s=SETTLE_S)
                for task in (faults, keeper):
                    task.cancel()
                self._let_go()
        except (Deadlock, Endless) as error:
            swarm.failed(str(error))

    def _heal(self) -> None:
        """Undo all faults."""
        for undo in self._undo:
            undo()

    def _let_go(self) -> None:
        """Peers in contact with the coordinator end by themselves; the others would wait forever, and are ended."""
        swarm, lives = self.swarm, list(self.swarm.lives.values())
        for life in swarm.peers:  # a peer that did not find the run in time waits for it until its owner ends it
            if life.is_running and life.daemon is not None and life.daemon.assignment is None:
                life.process.call_soon(partial(life.daemon.leave, "asked by a signal"))
        if not swarm.is_over:
            swarm.failed(f"the run stands still at step {swarm.step}")
            return
        told = [life for life in lives if life.stage < 0 or self._is_in_contact(life)]
        self._heal()
        if not swarm.loop.run_until(lambda: not any(life.is_running for life in told), limit_s=LEAVE_S):
            left = [life.name for life in told if life.is_running]
            swarm.failed(f"the run is over, and these daemons do not end: {', '.join(left)}")

    def _is_in_contact(self, life: Life) -> bool:
        """Whether a peer hosts a stage and can reach the coordinator."""
        swarm, assignment = self.swarm, getattr(life.daemon, "assignment", None)
        if not life.is_running or assignment is None or life.process.is_stopped:
            return False
        names, host = (life.name, swarm.coordinator.name), life.process.host
        is_blocked = swarm.network.is_blocked(*names) or swarm.network.is_blocked(*reversed(names))
        is_heard = assignment.peer.contact_at > swarm.now - CONTACT_S
        return not is_blocked and host is not None and host.is_ready and is_heard

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.swarm.failed(f"the director failed: {told(error)}")

    def _rules(self) -> MoveRules:
        return (
            MoveRules(RebalanceRule.CAPACITY, 0.05, 1, 1.0, 2.0)
            if self.schedule.moves
            else MoveRules(rule=RebalanceRule.NONE)
        )

    def _start_peer(self, name: str, stage: int, speed: float | None = None) -> None:
        self._wanted[name] = True
        self.swarm.start_peer(name, stage, speed=speed, may_move=self.schedule.moves)

    async def _keep(self) -> None:
        """Restart daemons that should run and have ended, and start peers for stages without one."""
        swarm = self.swarm
        ended_at: dict[str, float] = {}
        while True:
            await asyncio.sleep(RESTART_S / 4)
            if swarm.is_over:
                continue
            for excess in excesses(swarm):
                swarm.failed(excess)
            for name, is_wanted in list(self._wanted.items()):
                life = swarm.lives[name]
                if life.is_running or not is_wanted:
                    ended_at.pop(name, None)
                elif swarm.now - ended_at.setdefault(name, swarm.now) > RESTART_S:
                    self._start_again(life)
            if self._faults_done:
                for stage in range(swarm.manifest.stages.count):
                    if not any(peer.is_running and peer.stage == stage for peer in swarm.peers):
                        self._start_peer(f"peer{next(self._newcomers)}", stage)

    _faults_done = False

    def _start_again(self, life: Life) -> None:
        if life.stage < 0:
            self.swarm.start_coordinator(life.name, wait=False, min_peers=1, moves=self._rules())
        else:
            self._start_peer(life.name, life.stage)

    async def _faults(self) -> None:
        swarm = self.swarm
        for fault in self.schedule.faults:
            waited_from = swarm.now
            while swarm.step < fault.step and swarm.now - waited_from < PATIENCE_S:  # noqa: ASYNC110  # events are sync
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(fault.delay_s)
            if swarm.is_over:
                return
            if self._do(fault):
                self.happened.append(f"{swarm.now:.3f} {fault}")
                swarm.note(f"{swarm.now:.9f} fault {fault}")
        self._faults_done = True

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> bool:
        """Inject a fault; whether that was possible."""
        does = getattr(self, "_" + fault.kind.replace("-", "_"))
        return bool(does(fault))

    def _life(self, name: str) -> Life | None:
        life = self.swarm.lives.get(name)
        return life if life is not None and life.is_running else None

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undo it after a while, or when the schedule is over; once."""
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                undo()

        self._undo.append(once)
        self.swarm.at(self.swarm.now + seconds, once)

    def _away(self, life: Life, fault: Fault) -> None:
        """The daemon is started again after the fault's length."""
        self._wanted[life.name] = False

        def wanted() -> None:
            self._wanted[life.name] = True

        self._later(fault.length_s, wanted)

    def _kill(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        self._away(life, fault)
        life.kill()
        return True

    def _restart(self, fault: Fault) -> bool:
        """Kill and restart at once: other daemons may not notice that it is another process."""
        if (life := self._life(fault.target)) is None:
            return False
        life.kill()
        self._start_again(life)
        return True

    _coordinator_restart = _restart

    def _power_loss(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        machine = life.machine
        machine.luck = random.Random(f"{self.schedule.seed}:{fault}") if fault.amount else None
        if fault.point:  # in the middle of a write

            def disarm() -> None:
                machine.syncs_left = None

            machine.syncs_left = fault.nth
            self._later(fault.length_s, disarm)
            return True
        self._away(life, fault)
        life.kill(power_loss=True)
        return True

    _coordinator_power_loss = _power_loss

    def _point(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None or life.daemon is None:
            return False
        life.arm(fault.point, fault.nth, fault.action)
        life.stop_s = fault.length_s
        return True

    _coordinator_point = _point
    _corrupt = _point

    def _stop(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        process = life.process
        process.stop()
        self._later(fault.length_s, process.resume)
        return True

    _coordinator_stop = _stop
    _coordinator_kill = _kill

    def _drain(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        self._away(life, fault)
        life.process.call_soon(lambda: life.daemon.leave("asked by a signal"))
        return True

    def _pause(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        assignment = life.daemon.assignment
        if assignment is None or assignment.peer.state.value != "serving":
            return False
        process = life.process
        process.ask("pause")
        self._later(fault.length_s, lambda: process.ask("resume") if process.is_running else None)
        return True

    def _join(self, fault: Fault) -> bool:
        stage = int(fault.target.removeprefix("stage"))
        if len(self.swarm.peers) >= 40 or not (self.swarm.coordinator.state_dir / "invite").exists():
            return False
        self._start_peer(f"peer{next(self._newcomers)}", stage)
        return True

    def _empty_stage(self, fault: Fault) -> bool:
        stage = int(fault.target.removeprefix("stage"))
        victims = [peer for peer in self.swarm.peers if peer.is_running and peer.stage == stage]
        for life in victims:
            self._away(life, fault)
            life.kill()
        return bool(victims)

    def _cut(self, fault: Fault) -> bool:
        return self.swarm.network.cut(fault.target) > 0

    def _cut_pair(self, fault: Fault) -> bool:
        return self.swarm.network.cut(fault.target, fault.other) > 0

    def _flip(self, fault: Fault) -> bool:
        """Flip bits of the next data in and out, one after the other."""
        network, left, ends_at = self.swarm.network, int(fault.amount), self.swarm.now + FLIP_S

        def flip() -> None:
            nonlocal left
            left -= network.flip(fault.target)
            if left > 0 and self.swarm.now < ends_at:
                self.swarm.at(self.swarm.now + POLL_S, flip)

        flip()
        return True

    def _block(self, pairs: list[tuple[str, str]], length_s: float) -> None:
        network = self.swarm.network
        for source, target in pairs:
            network.block(source, target)

        def undo() -> None:
            for source, target in pairs:
                network.block(source, target, False)

        self._later(length_s, undo)

    def _partition(self, fault: Fault) -> bool:
        names, side = list(self.swarm.lives), int(fault.amount)
        left = [name for index, name in enumerate(names) if side >> index & 1]
        right = [name for name in names if name not in left]
        self._block([pair for a in left for b in right for pair in ((a, b), (b, a))], fault.length_s)
        return bool(left and right)

    def _one_way(self, fault: Fault) -> bool:
        self._block([(fault.target, fault.other)], fault.length_s)
        return True

    def _slow_line(self, fault: Fault) -> bool:
        line = self.swarm.network.line(fault.target, fault.other)
        before, line.bytes_per_s = line.bytes_per_s, fault.amount

        def undo() -> None:
            line.bytes_per_s = before
            line.free_at = min(line.free_at, self.swarm.now + 1.0)

        self._later(fault.length_s, undo)
        return True

    def _transport(self, fault: Fault) -> bool:
        life = self._life(fault.target)
        if life is None or life.process.host is None or not life.process.host.is_ready:
            return False
        host = life.process.host
        life.process.call_soon(host.fail)
        self._later(min(8.0, fault.length_s), lambda: host.process.call_soon(host.recover))
        return True

    _coordinator_transport = _transport

    def _clock(self, fault: Fault) -> bool:
        machine = self.swarm.lives[fault.target].machine
        machine.step_clock(fault.amount)
        self._later(fault.length_s, lambda: machine.step_clock(-fault.amount))
        return True

    def _hang(self, fault: Fault) -> bool:
        if (life := self._life(fault.target)) is None:
            return False
        machine = life.machine
        machine.hangs = True
        self._later(fault.length_s, machine.release_device)
        return True

    def _disk_full(self, fault: Fault) -> bool:
        machine = self.swarm.lives[fault.target].machine
        machine.is_disk_full = True

        def undo() -> None:
            machine.is_disk_full = False

        self._later(fault.length_s, undo)
        return True

    def _disk_slow(self, fault: Fault) -> bool:
        machine = self.swarm.lives[fault.target].machine
        machine.disk_s, before = 1.0, machine.disk_s

        def undo() -> None:
            machine.disk_s = before

        self._later(fault.length_s, undo)
        return True
