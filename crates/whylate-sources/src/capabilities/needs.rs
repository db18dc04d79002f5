// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chooses the backend that each source would use, and names the missing needs of better ones.

use std::cell::OnceCell;
use std::fs;
use std::path::Path;

use super::bpf::{self, KernelNames};
use super::{Bpf, Btf, Fact, Privileges, State, Tracefs, privileges};
use crate::cpu_account;
use crate::kernel::need::{BackendInfo, Need};
use crate::kernel::pid_namespace;

/// Backends of a source.
#[derive(Clone, Debug)]
pub struct SourceBackends {
    /// Name of the source.
    pub name: &'static str,
    /// Backends that attaching would choose by itself, best first, each with its needs.
    pub backends: Vec<BackendInfo>,
}

/// Backend with which a source would measure here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Name of the source, or of the injected delay.
    pub name: String,
    /// `Yes`: it works. `No`: the kernel lacks something for every backend. `Unknown`: it may work.
    pub state: State,
    /// Backend that the source would use, if one works.
    pub backend: Option<String>,
    /// Limitation compared with the best backend; empty for the best.
    pub limitations: String,
    /// Better backends, best first.
    pub better: Vec<BetterBackend>,
}

/// A better backend that would not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BetterBackend {
    /// Name of the backend.
    pub backend: String,
    /// `No`: the kernel lacks something. `Unknown`: it may work.
    pub state: State,
    /// Missing features and how to enable them, or why they are unknown; without duplicates.
    pub reasons: Vec<String>,
}

/// Facts about this kernel. Each part is determined on first use, which takes milliseconds.
pub(crate) struct KernelFacts {
    refusal: Fact,
    btf: OnceCell<(Btf, Option<KernelNames>)>,
    tracefs: OnceCell<Tracefs>,
    tp_btf: OnceCell<Fact>,
    fentry: OnceCell<Fact>,
}

impl KernelFacts {
    /// Facts for a process with these privileges.
    pub(crate) fn new(privileges: &Privileges) -> Self {
        KernelFacts {
            refusal: privileges.refusal(),
            btf: OnceCell::new(),
            tracefs: OnceCell::new(),
            tp_btf: OnceCell::new(),
            fentry: OnceCell::new(),
        }
    }

    /// Facts for this process.
    pub(crate) fn here() -> Self {
        Self::new(&privileges::probe())
    }

    /// Returns a need that is surely not met; `None` if all are met, or may be.
    pub(crate) fn lacks(&self, needs: &[Need]) -> Option<String> {
        needs.iter().map(|&need| self.judge(need)).find(|fact| fact.state == State::No).map(|fact| fact.detail)
    }

    pub(super) fn btf(&self) -> &Btf {
        &self.btf.get_or_init(bpf::probe_btf).0
    }

    pub(super) fn names(&self) -> Option<&KernelNames> {
        self.btf.get_or_init(bpf::probe_btf).1.as_ref()
    }

    pub(super) fn tracefs(&self) -> &Tracefs {
        self.tracefs.get_or_init(super::probe_tracefs)
    }

    /// Returns the mount point of tracefs, if it is readable.
    fn tracing_directory(&self) -> Option<&str> {
        self.tracefs().path.as_deref().filter(|_| self.tracefs().fact.is_yes())
    }

    fn tp_btf(&self) -> &Fact {
        self.tp_btf.get_or_init(|| bpf::quietly(|| bpf::tp_btf(&self.refusal, self.names())))
    }

    fn fentry(&self) -> &Fact {
        self.fentry.get_or_init(|| bpf::quietly(|| bpf::fentry(&self.refusal, self.names())))
    }

    /// Tests whether a need is met; the detail names what is missing.
    fn judge(&self, need: Need) -> Fact {
        match need {
            Need::Btf => named("BTF", &self.btf().fact),
            // Backends with programs at functions need these functions as well.
            Need::TpBtfPrograms => named("tp_btf programs", self.tp_btf()),
            Need::Tracepoint(name) => self.tracepoint(name, "boot one that has it"),
            Need::RareTracepoint(name, where_it_is) => self.tracepoint(name, where_it_is),
            Need::Function(name) => self.function(name),
            Need::Since { version, function } => match self.names() {
                None => Fact::unknown(format!("Linux {version}: unknown without BTF")),
                Some(names) if names.have_function(function) => Fact::yes(""),
                Some(_) => Fact::no(format!("this kernel is older than Linux {version} (boot {version} or later)")),
            },
            Need::Map(kind) => {
                let (name, fact) = bpf::probe_map(kind, &self.refusal);
                named(name, &fact)
            }
            Need::KernelsNumbers if pid_namespace::own().is_none() => Fact::yes(""),
            Need::Proc => pid_namespace::lacks_proc().map_or_else(|| Fact::yes(""), Fact::no),
            Need::KernelsNumbers => {
                let reason =
                    "the kernel's tracers show the host's TIDs, which belong to other threads in this PID namespace";
                Fact::no(format!("{reason} (run in the host's, such as with --pid=host)"))
            }
            Need::Tracer(name) => self.tracer(name),
        }
    }

    fn tracepoint(&self, group_and_name: &str, remedy: &str) -> Fact {
        let (group, name) = group_and_name.split_once(':').unwrap_or(("", group_and_name));
        let is_there = match (self.names(), self.tracing_directory()) {
            (Some(names), _) => names.have_tracepoint(name),
            (None, Some(tracefs)) => Path::new(tracefs).join("events").join(group).join(name).is_dir(),
            (None, None) => {
                return Fact::unknown(format!("tracepoint {group_and_name}: unknown without BTF or tracefs"));
            }
        };
        if is_there {
            Fact::yes("")
        } else {
            Fact::no(format!("tracepoint {group_and_name} is not in this kernel ({remedy})"))
        }
    }

    fn tracer(&self, name: &str) -> Fact {
        let Some(tracefs) = self.tracing_directory() else {
            return Fact::unknown(format!("tracer {name}: unknown without tracefs"));
        };
        match fs::read_to_string(Path::new(tracefs).join("available_tracers")) {
            Ok(tracers) if tracers.split_whitespace().any(|tracer| tracer == name) => Fact::yes(""),
            Ok(_) => {
                let option = if name == "preemptoff" { "PREEMPT".to_owned() } else { name.to_uppercase() };
                Fact::no(format!("tracer {name} is not in this kernel (boot one with CONFIG_{option}_TRACER=y)"))
            }
            Err(error) => Fact::unknown(format!("tracer {name}: {error}")),
        }
    }

    fn function(&self, name: &str) -> Fact {
        let Some(names) = self.names() else {
            return Fact::unknown(format!("function {name}: unknown without BTF"));
        };
        if !names.have_function(name) {
            return Fact::no(format!(
                "function {name} is not in BTF (this kernel has no such function, or inlines it)"
            ));
        }
        named("fentry programs", self.fentry())
    }
}

/// Prefixes the remedy of a missing feature with its name. Unknown facts share one reason, so they get no name.
fn named(name: &str, fact: &Fact) -> Fact {
    match fact.state {
        State::No => Fact::no(format!("{name}: {}", fact.detail)),
        State::Yes | State::Unknown => fact.clone(),
    }
}

/// Returns the backend that a source would use.
pub(super) fn readiness(source: &SourceBackends, evidence: &KernelFacts) -> Readiness {
    let candidates = source.backends.iter().map(|backend| {
        let facts = backend.needs.iter().map(|&need| evidence.judge(need)).collect();
        (backend.name, backend.limitations, facts)
    });
    choose(source.name, candidates)
}

/// Returns how late events would be explained.
pub(super) fn causes(heartbeat: &Fact, evidence: &KernelFacts) -> Readiness {
    let facts: Vec<Fact> = cpu_account::NEEDS.iter().map(|&need| evidence.judge(need)).collect();
    let with_heartbeat = facts.iter().cloned().chain([named("a timer on each CPU", heartbeat)]).collect();
    let candidates = [("occupancy", "", with_heartbeat), ("no heartbeat", cpu_account::WITHOUT_HEARTBEAT, facts)];
    choose("--why", candidates)
}

/// Returns the delays that BPF can inject. `inject hog` is a thread, and works everywhere.
pub(super) fn injections(bpf: &Bpf) -> Vec<Readiness> {
    let ways = [
        ("inject work", "bpf_wq", &bpf.bpf_wq),
        ("inject irqs-off", "bpf_local_irq_save", &bpf.bpf_local_irq_save),
        ("inject preempt-off", "bpf_preempt_disable", &bpf.bpf_preempt_disable),
        ("inject softirq", "bpf_timer", &bpf.bpf_timer),
    ];
    let ready = ways.map(|(name, way, fact)| {
        let needs = [("syscall programs", &bpf.syscall_programs), ("array maps", &bpf.array_maps), (way, fact)];
        choose(name, [(way, "", needs.map(|(name, fact)| named(name, fact)).to_vec())])
    });
    ready.to_vec()
}

/// Chooses the first backend with all needs met. Candidates are name, limitation, and needs; best first.
fn choose<'a>(name: &str, candidates: impl IntoIterator<Item = (&'a str, &'a str, Vec<Fact>)>) -> Readiness {
    let mut better: Vec<BetterBackend> = Vec::new();
    for (backend, limitations, facts) in candidates {
        let state = worst(facts.iter().map(|fact| fact.state));
        if state == State::Yes {
            let (backend, limitations) = (Some(backend.to_owned()), limitations.to_owned());
            return Readiness { name: name.to_owned(), state, backend, limitations, better };
        }
        let mut reasons: Vec<String> = Vec::new();
        for fact in facts {
            // Unknown facts do not matter if something is surely missing; often that is why they are unknown.
            if fact.state == state && !reasons.contains(&fact.detail) {
                reasons.push(fact.detail);
            }
        }
        better.push(BetterBackend { backend: backend.to_owned(), state, reasons });
    }
    let may_work = better.iter().any(|backend| backend.state == State::Unknown);
    let state = if may_work { State::Unknown } else { State::No };
    Readiness { name: name.to_owned(), state, backend: None, limitations: String::new(), better }
}

/// Returns `No` if any state is `No`, else `Unknown` if any is `Unknown`.
fn worst(states: impl Iterator<Item = State>) -> State {
    states.fold(State::Yes, |worst, state| match (worst, state) {
        (State::No, _) | (_, State::No) => State::No,
        (State::Unknown, _) | (_, State::Unknown) => State::Unknown,
        (State::Yes, State::Yes) => State::Yes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::need::MapKind;

    fn backends() -> SourceBackends {
        let tracing =
            &[Need::Btf, Need::TpBtfPrograms, Need::Function("process_one_work"), Need::Map(MapKind::RingBuf)];
        let tracepoints = &[Need::TpBtfPrograms, Need::Tracepoint("workqueue:workqueue_queue_work")];
        let limitations = "requeue races are counted as lost";
        let backends = vec![
            BackendInfo { name: "fentry", needs: tracing, limitations: "" },
            BackendInfo { name: "tracepoint", needs: tracepoints, limitations },
        ];
        SourceBackends { name: "wq", backends }
    }

    fn facts(btf: Fact, names: Option<KernelNames>, tracefs: Option<&str>, tracing: Fact) -> KernelFacts {
        let fact = if tracefs.is_some() { Fact::yes("") } else { Fact::no("") };
        KernelFacts {
            refusal: Fact::unknown("not permitted"),
            btf: OnceCell::from((Btf { fact: btf, path: "", size_bytes: None }, names)),
            tracefs: OnceCell::from(Tracefs { fact, path: tracefs.map(str::to_owned), tracers: None }),
            tp_btf: OnceCell::from(tracing.clone()),
            fentry: OnceCell::from(tracing),
        }
    }

    fn bpf(tracing: Fact) -> Bpf {
        let yes = || Fact::yes("");
        Bpf {
            tp_btf: tracing.clone(),
            fentry: tracing,
            raw_tracepoint_programs: yes(),
            syscall_programs: yes(),
            array_maps: yes(),
            ring_buffer_maps: yes(),
            stack_trace_maps: yes(),
            bpf_wq: Fact::no("boot kernel 6.10 or later"),
            bpf_timer: yes(),
            bpf_local_irq_save: yes(),
            bpf_preempt_disable: yes(),
            task_iterator: yes(),
        }
    }

    fn on(functions: &[&str], tracing: Fact) -> Readiness {
        let names = KernelNames::new(functions.iter().map(|&name| (name, 1)), [("btf_trace_workqueue_queue_work", 2)]);
        readiness(&backends(), &facts(Fact::yes(""), Some(names), None, tracing))
    }

    #[test]
    fn best_backend_has_no_limitation() {
        let best = on(&["process_one_work"], Fact::yes(""));
        assert_eq!(best.backend.as_deref(), Some("fentry"));
        assert!(best.better.is_empty() && best.limitations.is_empty());
    }

    #[test]
    fn fallback_names_limitation_and_reason() {
        let fallback = on(&[], Fact::yes(""));
        assert_eq!(fallback.backend.as_deref(), Some("tracepoint"));
        assert_eq!(fallback.limitations, "requeue races are counted as lost");
        assert_eq!(fallback.better[0].backend, "fentry");
        assert_eq!(fallback.better[0].state, State::No);
        assert!(fallback.better[0].reasons[0].contains("process_one_work"));
    }

    #[test]
    fn missing_privileges_are_reported_once() {
        let unknown = on(&["process_one_work"], Fact::unknown("not permitted"));
        assert_eq!((unknown.state, unknown.backend), (State::Unknown, None));
        assert_eq!(unknown.better[0].reasons, ["not permitted"]);
    }

    #[test]
    fn no_backend_works_without_tp_btf() {
        let none = on(&["process_one_work"], Fact::no("boot another kernel"));
        assert_eq!((none.state, none.backend), (State::No, None));
        assert_eq!(none.better[1].reasons, ["tp_btf programs: boot another kernel"]);
    }

    #[test]
    fn uses_tracefs_for_tracepoints_without_btf() {
        let tracefs = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(tracefs.path().join("events/workqueue/workqueue_queue_work")).expect("a directory");
        let mut evidence = facts(Fact::no("boot another"), None, tracefs.path().to_str(), Fact::yes(""));
        assert!(evidence.judge(Need::Tracepoint("workqueue:workqueue_queue_work")).is_yes());
        assert_eq!(evidence.judge(Need::Tracepoint("workqueue:other")).state, State::No);
        assert_eq!(evidence.judge(Need::Function("process_one_work")).state, State::Unknown);
        assert_eq!(evidence.judge(Need::Btf).state, State::No);
        assert_eq!(evidence.lacks(&[Need::TpBtfPrograms]), None);
        assert!(evidence.lacks(&[Need::TpBtfPrograms, Need::Btf]).is_some_and(|lacks| lacks.contains("boot another")));
        evidence = facts(Fact::no("boot another"), None, None, Fact::yes(""));
        assert_eq!(evidence.judge(Need::Tracepoint("workqueue:workqueue_queue_work")).state, State::Unknown);
    }

    #[test]
    fn causes_without_heartbeat_have_limitation() {
        let needed = ["btf_trace_sched_switch", "btf_trace_sched_waking", "btf_trace_sched_migrate_task"];
        let needed = needed.into_iter().chain(["btf_trace_irq_handler_entry", "btf_trace_softirq_entry"]);
        let needed = needed.chain(["btf_trace_workqueue_execute_start", "btf_trace_hrtimer_expire_entry"]);
        let causes_with = |heartbeat: Fact, left_out: usize| {
            let names = KernelNames::new([], needed.clone().skip(left_out).map(|name| (name, 1)));
            causes(&heartbeat, &facts(Fact::yes(""), Some(names), None, Fact::yes("")))
        };
        assert_eq!(causes_with(Fact::yes(""), 0).backend.as_deref(), Some("occupancy"));
        let limitations = causes_with(Fact::no("not permitted"), 0);
        assert_eq!(limitations.backend.as_deref(), Some("no heartbeat"));
        assert!(
            limitations.limitations.contains("interrupts")
                && limitations.better[0].reasons[0].contains("not permitted")
        );
        assert_eq!(causes_with(Fact::yes(""), 1).state, State::No);
    }

    #[test]
    fn each_injection_has_its_own_needs() {
        let found = injections(&bpf(Fact::yes("")));
        assert_eq!(found[0].state, State::No);
        assert_eq!(found[0].better[0].reasons, ["bpf_wq: boot kernel 6.10 or later"]);
        let works = |name| found.iter().any(|one| one.name == name && one.state == State::Yes);
        assert!(works("inject irqs-off") && works("inject softirq"));
    }
}
