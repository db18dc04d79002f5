// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders programs that were held up for a large share of the time, one line each.

use whylate_model::holders::Holder;
use whylate_model::object::{Object, Peer};
use whylate_model::programs::{HeldUpBy, HeldUpPart, HeldUpProgram, Programs, Spawned};
use whylate_model::units::{format_ns, format_span, printable};
use whylate_model::{ActorName, Cause};

use crate::render::text::why;

/// Maximum number of parts, and minimum share of the held-up time for a second part.
const MAX_PARTS: usize = 2;
const MIN_SHARE: f64 = 0.25;

/// Renders a program, the share of its time for which it was held up, the culprits, the calls and the objects.
pub fn line(programs: &Programs, of: &HeldUpProgram) -> String {
    let latency = of.latency();
    let (percent, span) = (of.share(programs.covered_ns) * 100.0, format_span(programs.covered_ns));
    let waits = why::counted(latency.count(), "wait");
    let (who, p50) = (printable(of.program()), format_ns(latency.printed_quantile_ns(0.5)));
    let others = if of.others > 0 { format!(" (and {} more with this name)", of.others) } else { String::new() };
    format!("{who}{others} was held up for {percent:.0}% of {span} ({waits}, p50 {p50}) by {}", by(programs, of))
}

/// Says that programs were not judged, if too little of the time was read.
pub fn unjudged(programs: &Programs) -> Option<String> {
    let read = format_ns(programs.covered_ns);
    programs.are_unjudged().then(|| format!("Programs were not judged: only {read} of the CPU trace could be read."))
}

/// Renders the culprits, calls and objects of a held-up program.
pub fn by(programs: &Programs, of: &HeldUpProgram) -> String {
    let all_ns = of.held_up_ns().max(1);
    let is_large = |part: &&HeldUpPart| part.ns as f64 >= MIN_SHARE * all_ns as f64;
    let parts = of.parts.iter().filter(is_large).take(MAX_PARTS);
    let parts: Vec<String> = parts.map(|part| part_text(programs, part)).collect();
    parts.join("; and by ")
}

/// Renders a part after "held up by".
fn part_text(programs: &Programs, part: &HeldUpPart) -> String {
    let main = part.causes.first();
    let by = main.map(|cause| culprit(cause) + &runs(programs, cause));
    let by = by.unwrap_or_else(|| word(part.by).to_owned());
    let via = part.via.as_deref().map_or_else(String::new, |via| format!(", {}", printable(via)));
    let object = part.object.as_ref().map_or_else(String::new, |object| {
        let named = main.and_then(|cause| cause.who.comm());
        format!(" {}", name(object, named))
    });
    format!("{by}{via}{object}")
}

fn culprit(cause: &Cause) -> String {
    why::culprit(cause.kind, &cause.who)
}

/// Renders how often the culprit was started, and the thread that started it, if it is one of many short-lived processes.
fn runs(programs: &Programs, cause: &Cause) -> String {
    let is_of = |of: &&Spawned| cause.who.tid().is_none() && cause.who.comm() == Some(of.name.as_str());
    let Some(of) = programs.spawned.iter().find(is_of) else { return String::new() };
    let a_second = of.runs as f64 * 1e9 / programs.covered_ns.max(1) as f64;
    format!(" ({a_second:.0} runs/s, started by {})", printable(&of.by))
}

/// Renders an object with the names of its peers, unless the culprit is one of them. What a peer did in one wait does not
/// hold for all.
fn name(object: &Object, culprit: Option<&str>) -> String {
    let object = Object { timeout_ns: None, expires_in_ns: None, ..object.clone() };
    let names = |peer: &Peer| Peer {
        process: Holder { who: peer.process.who.clone(), ..Holder::default() },
        others: peer.others,
    };
    let is_culprit = |peer: &Peer| {
        let who = peer.process.who.parse::<ActorName>().ok();
        culprit.is_some() && who.as_ref().and_then(ActorName::comm) == culprit
    };
    let (peers, other_peers) = match object.peers.iter().any(is_culprit) {
        true => (Vec::new(), 0),
        false => (object.peers.iter().map(names).collect(), object.other_peers),
    };
    Object { peers, other_peers, ..object }.to_string()
}

fn word(by: HeldUpBy) -> &'static str {
    match by {
        HeldUpBy::RunQueue => "other threads on its CPU",
        HeldUpBy::Quota => "a CPU quota",
        HeldUpBy::Lock => "a lock",
        HeldUpBy::Disk => "a disk",
        HeldUpBy::Memory => "a lack of memory",
        HeldUpBy::Program => "another program",
        HeldUpBy::Unknown => "something unknown",
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::object::ObjectKind;
    use whylate_model::{ActorName, CauseKind};

    use super::*;

    #[test]
    fn names_share_waits_culprit_call_and_object() {
        let part = HeldUpPart {
            by: HeldUpBy::Lock,
            via: Some("flock".to_owned()),
            object: Some(Object::with_path(ObjectKind::File, "/var/lib/app/lock")),
            object_waits: 8,
            ns: 5_200_000_000,
            latency: [49_000_000; 89].into_iter().collect(),
            causes: vec![Cause::new(CauseKind::Running, ActorName::thread("indexer", 812), 5_200_000_000)],
        };
        let who = ActorName::thread("service", 17_097);
        let of = HeldUpProgram { who, lived_ns: 10_000_000_000, parts: vec![part.clone()], ..Default::default() };
        let mut programs = Programs { covered_ns: 10_000_000_000, held_up: vec![of], ..Programs::default() };
        let text = line(&programs, &programs.held_up[0]);
        let by = "thread indexer:812 running, flock file /var/lib/app/lock";
        assert_eq!(text, format!("service:17097 was held up for 52% of 10.0s (89 waits, p50 49.0ms) by {by}"));
        let run_queue = HeldUpPart {
            by: HeldUpBy::RunQueue,
            via: None,
            object: None,
            object_waits: 0,
            causes: vec![Cause::new(CauseKind::Thread, ActorName::program("true"), 5_200_000_000)],
            ..part
        };
        programs.held_up[0].parts.push(run_queue);
        let by_spawner = Spawned { name: "true".to_owned(), by: ActorName::thread("spawner", 812), runs: 3_000 };
        programs.spawned = vec![by_spawner];
        programs.held_up[0].others = 2;
        let text = line(&programs, &programs.held_up[0]);
        let also = "and by thread true (300 runs/s, started by spawner:812)";
        let starts = "service:17097 (and 2 more with this name) was held up for ";
        assert!(text.starts_with(starts) && text.ends_with(also), "{text}");
    }

    #[test]
    fn object_has_its_peers_unless_the_culprit_is_one() {
        let process = Holder { who: "gzip:88".to_owned(), state: "S".to_owned(), ..Holder::default() };
        let pipe = Object { peers: vec![Peer { process, others: 2 }], ..Object::new(ObjectKind::Pipe) };
        let with_peer = "a pipe, other end held by gzip:88 and 2 more with this name";
        assert_eq!([None, Some("tar"), Some("gzip")].map(|of| name(&pipe, of)), [with_peer, with_peer, "a pipe"]);
    }

    #[test]
    fn too_little_time_judges_no_program() {
        let covered = |covered_ns| unjudged(&Programs { covered_ns, ..Programs::default() });
        let sentence = "Programs were not judged: only 412ms of the CPU trace could be read.";
        assert_eq!(covered(412_000_000).as_deref(), Some(sentence));
        // A recording without programs, and enough time.
        assert_eq!((covered(0), covered(1_000_000_000)), (None, None));
    }
}
