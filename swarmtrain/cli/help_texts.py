"""For `--help`: which verbs and options belong together, and an example or two of each verb."""

from __future__ import annotations

from collections.abc import Mapping

Options = Mapping[str, tuple[str, ...]]

VERB_GROUPS: Options = {
    "Take part": ("local", "init", "join", "doctor", "status", "credit", "top"),
    "A peer of yours": ("page", "pause", "resume", "drain", "service"),
    "Coordinate a run": ("presets", "manifest", "plan", "coordinator", "invite", "members", "audit"),
    "Use a model": ("train", "eval", "generate", "export", "data"),
    "Study": ("study", "sim"),
    "This program": ("completion",),
}

OPTION_GROUPS: Mapping[str, Options] = {
    "local": {
        "The run": ("steps", "set_", "stages", "peers", "threads", "state_dir"),
        "Faults": ("kill_every", "kill_coordinator", "seed"),
    },
    "coordinator": {
        "The run": ("steps", "set_", "state_dir", "min_peers", "samples", "invite_file", "admission"),
        "Network": ("listen", "announce", "bootstrap", "page", "public_page"),
        "Where peers work": ("route", "rebalance", "min_left", "min_gain", "min_stay", "look_every"),
    },
    "join": {
        "What to host": ("stage", "gpu", "cpu", "threads", "name", "state_dir", "profile"),
        "Limits": ("max_memory", "offload", "max_samples", "max_up", "max_down", "drain_timeout", "find_timeout"),
        "Courtesy to the machine's owner": (
            "hours",
            "time_zone",
            "only_when_idle",
            "pause_while",
            "yield_gpu",
            "max_gpu_temperature",
            "max_gpu_power",
            "max_traffic",
            "traffic_day",
            "nice",
        ),
        "Network": ("listen", "announce", "behind_nat", "relay", "route", "metrics", "metrics_announce"),
    },
    "sim": {
        "The swarm": ("peers", "stages", "peers_per_stage", "manifest", "profile", "policy", "set_"),
        "Churn": ("no_churn", "mean_life", "mean_absence", "trace"),
        "The simulation": ("minutes", "warmup", "seed", "runs"),
    },
    "study": {
        "What to train": ("methods", "seeds", "steps", "set_", "threads"),
        "Results": ("out", "link", "stage_seconds", "plots"),
    },
}

# By verb: a command, and what it is good for.
EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("swarmtrain local", "a whole swarm on this machine"),
        ("swarmtrain join INVITE --gpu 0", "host a stage of somebody's run"),
        ("swarmtrain coordinator nano", "begin a run of your own"),
    ),
    "local": (
        ("swarmtrain local nano --steps 50", "a falling loss within a minute"),
        ("swarmtrain local nano --kill-every 15s", "kill a peer every 15 seconds, and watch the recovery"),
    ),
    "coordinator": (
        ("swarmtrain coordinator nano --set stages.count=2", "a preset, changed"),
        (
            "swarmtrain coordinator run.toml --listen /ip4/0.0.0.0/tcp/4001",
            "a manifest of your own, on a port that volunteers can reach",
        ),
    ),
    "join": (
        ("swarmtrain join INVITE --gpu 0 --name attic", "host the stage that needs it most"),
        ("swarmtrain join INVITE --max-up 20mbit --max-memory 8GB", "leave something for others"),
        ("swarmtrain join INVITE --hours 22:00-07:00 --pause-while game", "when nobody needs the machine"),
        ("swarmtrain join INVITE --max-traffic 200GB/month", "on a line that is paid by volume"),
        ("swarmtrain join INVITE --behind-nat", "from behind a router"),
    ),
    "init": (
        ("swarmtrain init", "a file with a comment for every line, to be edited"),
        ("swarmtrain init --profile night.toml", "one of several, for `swarmtrain join --profile night.toml`"),
    ),
    "doctor": (
        ("swarmtrain doctor INVITE --gpu 0", "try all that joining this run would need"),
        ("swarmtrain doctor --preset llama-8b --stage 30", "try a microbatch of a stage: time and memory"),
    ),
    "status": (("swarmtrain status --json", "every counter, for a program"),),
    "credit": (
        ("swarmtrain credit", "what counts as the work of this machine's peers"),
        ("swarmtrain credit --verify receipt.json --invite INVITE", "whether the run has signed it"),
    ),
    "top": (
        ("swarmtrain top", "of the coordinator on this machine"),
        ("swarmtrain top http://192.0.2.7:8080/ --once", "one frame, of another"),
    ),
    "page": (("swarmtrain page", "pause, resume, hours and limits, in a browser of this machine"),),
    "pause": (("swarmtrain pause", "all peers of this machine, until `swarmtrain resume`"),),
    "resume": (("swarmtrain resume", "after `swarmtrain pause`"),),
    "drain": (("swarmtrain drain", "finish the step and leave: as Ctrl-C"),),
    "service install": (
        ("swarmtrain service install INVITE -- --gpu 0 --name attic", "options of `swarmtrain join` behind `--`"),
        ("swarmtrain service install INVITE --system", "as root: starts with the machine, under a user of its own"),
    ),
    "service start": (("swarmtrain service start", "after `swarmtrain service stop`"),),
    "service stop": (("swarmtrain service stop", "finish the step and leave; it starts again with the next boot"),),
    "service status": (("swarmtrain service status", "what systemd says, and what the peer does"),),
    "service logs": (("swarmtrain service logs --follow", "as they come"),),
    "service uninstall": (("swarmtrain service uninstall", "leave, and remove every trace of the service"),),
    "presets": (("swarmtrain presets", "which sizes there are"),),
    "manifest": (("swarmtrain manifest nano > run.toml", "a file to start from"),),
    "plan": (("swarmtrain plan llama-1b --peers gaming-gpu=64", "how fast 64 gaming GPUs would train it"),),
    "invite": (("swarmtrain invite make --for alice", "one volunteer, once, within a week"),),
    "invite list": (("swarmtrain invite list", "which there are, and how often each was used"),),
    "invite make": (
        ("swarmtrain invite make --for alice", "one volunteer, once, within a week"),
        ("swarmtrain invite make --for the-lab --uses 20 --expires 30d", "twenty of them"),
    ),
    "invite revoke": (("swarmtrain invite revoke 0", "the one that the coordinator prints; members stay"),),
    "members": (("swarmtrain members list", "who is in, who waits, who is excluded"),),
    "members list": (("swarmtrain members list --json", "with everything that is known of each"),),
    "members admit": (("swarmtrain members admit PEER", "one that waits, with --admission closed"),),
    "members ban": (("swarmtrain members ban attic --reason 'sent garbage'", "for good, whatever it is called next"),),
    "members unban": (("swarmtrain members unban attic", "it may take part again"),),
    "members forget": (("swarmtrain members forget attic", "its certificate ends; with an invite it may come back"),),
    "audit": (("swarmtrain audit STATE_DIR", "exit code 0, or 6 and what is wrong"),),
    "train": (("swarmtrain train nano --steps 200 --out runs/nano", "the reference: one process, no network"),),
    "eval": (("swarmtrain eval runs/nano", "the newest checkpoint there"),),
    "generate": (('swarmtrain generate runs/nano --prompt "The people" --seed 1', "the same seed, the same text"),),
    "export": (("swarmtrain export runs/nano --out nano-llama", "what transformers loads"),),
    "data prepare": (
        ("swarmtrain data prepare *.txt --out shards", "bytes as tokens"),
        ("swarmtrain data prepare *.jsonl.gz --out shards --train-bpe 32000", "a tokenizer of your own"),
    ),
    "data": (("swarmtrain data prepare *.txt --out shards", "text into token shards"),),
    "study": (
        (
            "swarmtrain study nano --methods dense,subspace8,quant4 --out study",
            "what compression costs, on the same tokens",
        ),
    ),
    "sim": (("swarmtrain sim --peers 1000 --stages 8", "a swarm under churn"),),
    "service": (("swarmtrain service install INVITE", "start with the machine, and again after a crash"),),
    "completion": (
        ("swarmtrain completion bash >> ~/.bashrc", "also zsh and fish"),
        ("swarmtrain completion fish > ~/.config/fish/completions/swarmtrain.fish", "of fish"),
    ),
}
