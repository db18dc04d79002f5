// SPDX-License-Identifier: MIT OR Apache-2.0

use whylate_model::late::CGROUP;
use whylate_model::sources::{BLOCK, WQ};
use whylate_model::{ActorName, Cause, CauseKind, Cgroup, LateEvent, Snapshot};

use super::messages::MetricFamily;
use super::*;

/// Counters of some waits, a late event of a container, and losses.
fn totals() -> Totals {
    let mut totals = Totals::new(1_700_000_000_000_000_000, vec![&BLOCK, &WQ], None);
    let container = "0123456789abcdef".repeat(4);
    let by = ActorName::thread("gz\"ip\n", 812);
    let cause = Cause {
        cgroup: Some(Cgroup::new(&format!("/docker/{container}"))),
        ..Cause::new(CauseKind::Thread, by, 60_000_000)
    };
    totals.late(
        &BLOCK,
        &LateEvent {
            latency_ns: 60_000_000,
            at_unix_ns: 1_700_000_001_500_000_000,
            cpu: 1,
            causes: vec![cause],
            labels: [(CGROUP.to_owned(), "/system.slice/db.service".to_owned())].into(),
            ..LateEvent::default()
        },
    );
    for (card, source) in [(&BLOCK, "block"), (&WQ, "wq")] {
        let mut snapshot = Snapshot::new(source, "tp_btf", "host", 1_700_000_000_000_000_000);
        snapshot.duration_ns = 10_000_000_000;
        snapshot.lost = [("series_full".to_owned(), 3)].into();
        totals.snapshot(card, &snapshot);
    }
    totals
}

fn pages() -> Pages {
    let own = Own {
        cpu_seconds: 0.25,
        resident_bytes: 40_000_000,
        map_bytes: 90_000_000,
        descriptors: 100,
        started_seconds: 1_700_000_000.0,
        sources: vec![("wq", Some("tp_btf".to_owned())), ("block", Some("tp_btf".to_owned())), ("offcpu", None)],
        replayed_unix_ns: None,
        refused: 0,
    };
    Pages::encode(&totals(), &own).expect("it is encoded")
}

#[test]
fn text_has_all_families() {
    insta::assert_snapshot!("prometheus", pages().text);
}

#[test]
fn open_metrics_has_examples() {
    let pages = pages();
    let text = &pages.open_metrics;
    assert!(text.ends_with("# EOF\n"));
    assert!(text.contains("# TYPE whylate_late counter\n"), "{text}");
    assert!(text.contains("whylate_late_total{source=\"block\"} 1\n"), "{text}");
    let example = r##" # {kind="thread",who="gz\"ip?",cpu="1"} 0.06 1700000001.500"##;
    assert!(text.lines().any(|line| line.contains("le=\"0.067108863\"") && line.ends_with(example)), "{text}");
}

#[test]
fn messages_have_the_same_metrics() {
    let pages = pages();
    let mut rest = pages.in_form(Form::Protobuf);
    let mut families = Vec::new();
    while !rest.is_empty() {
        families.push(MetricFamily::decode_length_delimited(&mut rest).expect("a message"));
    }
    let mut text = String::new();
    super::text::write(&mut text, &families, false).expect("it is written");
    assert_eq!(text, pages.text);
    let waits = families.iter().find(|family| family.name == "whylate_wait_seconds").expect("waits");
    let empty = waits.metric[0].histogram.as_ref().expect("a histogram");
    assert_eq!((empty.schema, empty.positive_span.len(), empty.exemplars.len()), (3, 1, 1));
    assert!(empty.start_timestamp.is_some());
}

#[test]
fn client_gets_the_form_that_it_prefers() {
    let with_native = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,\
                       application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                       application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,\
                       text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
    for (accept, form) in [
        (with_native, Form::Protobuf),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            Form::OpenMetrics,
        ),
        ("text/plain;version=0.0.4", Form::Text),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Form::Text),
        ("application/vnd.google.protobuf;q=0, text/plain", Form::Text),
        ("", Form::Text),
    ] {
        assert_eq!(Form::preferred(accept), form, "{accept}");
    }
}
