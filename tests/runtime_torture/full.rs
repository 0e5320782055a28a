//! The whole figures of PROMISES 15 to 25, and 29,, written to `benches/results/torture-runtime.json`. `make torture-runtime`
//! runs this.

use serde_json::json;

use crate::{
    SEED, bad_calls, crowds, exits, fake, loading, memory, padding, races, real,
    report::{Report, machine, printed, profile},
    sessions, shim, values,
};

const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/benches/results/torture-runtime.json"
);

pub fn run() {
    let mut machine = machine();
    machine["torch"] = json!(fake::target().torch);
    machine["compiler"] = json!(printed("g++", &["-dumpfullversion"]));
    let head = json!({
        "schema": 1,
        "command": "make torture-runtime",
        "machine": machine,
        "profile": profile(),
        "seed": SEED,
    });
    let mut report = Report::new(FILE, head, &["bad"]);
    let report = &mut report;
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let store = real::store();
    let missing = "run `cargo test --test numerics` first";

    report.part("15 bad calls", |r| bad_calls::run(SEED, r.count(100_000)));
    match store.as_ref().filter(|store| values::there(store)) {
        Some(store) => report.part("15 hostile values", |r| {
            values::run(store, r.count(100_000), SEED)
        }),
        None => report.skip("15 hostile values", missing),
    }
    report.part("16 mixed calls", |r| {
        crowds::mixed(&[4, 8, 16, 32, 64], r.count(1_000_000), SEED)
    });
    report.part("16 fresh containers", |r| {
        crowds::fresh(r.count(10_000), SEED)
    });
    let sizes = [(1, 1), (2, 3), (4, 4), (8, 4), (5, 7), (8, 16)];
    report.part("17 padding, fake artifacts", |_| padding::fakes(&sizes));
    match &store {
        Some(store) => report.part("17 padding, real artifacts", |_| padding::real(store)),
        None => report.skip("17 padding, real artifacts", missing),
    }
    report.part("18 wrong hosts", |_| loading::hosts());
    report.part("19 swap races", |r| {
        races::run(r.count(100_000), cores.div_ceil(2), SEED)
    });
    report.part("20 artifacts that do not load", |r| {
        loading::broken(r.count(5_000), SEED)
    });
    report.part("21 outputs are the caller's", |r| {
        crowds::outputs(r.count(200_000), SEED)
    });
    report.part("22 weights once", |_| memory::sharing(8, 256 << 20));
    report.part("23 no memory", |r| memory::exhaustion(r.count(100)));
    report.part("24 leaks", |r| memory::leaks(r.count(1_000_000)));
    report.part("24 exits in mid-work", |r| {
        exits::run(r.count(1_000), cores, SEED)
    });
    report.part("25 hot swaps", |r| crowds::swaps(r.count(1_000), 4));
    report.part("29 mixed calls in sessions", |r| {
        sessions::mixed(r.count(100_000), SEED)
    });
    report.part("29 sessions opened and closed", |r| {
        sessions::opened(r.count(10_000))
    });
    report.part("the shim under sanitizers", |r| shim::run(r.count(40_000)));
    report.end();
}
