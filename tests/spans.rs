//! The spans that a subscriber of `tracing` sees. A binary of its own: what is enabled is decided for a whole process.
#![cfg(feature = "torch")]

mod fake;

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

use fake::{Fake, Memory};
use precast::{Device, Runtime, Value};
use tracing::{Metadata, span};

fn x(rows: usize, cols: usize) -> Value {
    Value::new(&vec![1.0_f32; rows * cols], &[rows, cols]).unwrap()
}

/// Keeps the names of the spans that this thread enters, and of which they are part.
#[derive(Default)]
struct Spans {
    made: Mutex<Vec<String>>,
    entered: Mutex<Vec<String>>,
    next: AtomicU64,
}

struct Fields(String);

impl tracing::field::Visit for Fields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if !["program", "device", "object", "digest"].contains(&field.name()) {
            self.0 += &format!(" {}={value:?}", field.name());
        }
    }
}

impl tracing::Subscriber for &'static Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }
    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut fields = Fields(attributes.metadata().name().to_owned());
        attributes.record(&mut fields);
        self.made.lock().unwrap().push(fields.0);
        span::Id::from_u64(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }
    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        let mut made = self.made.lock().unwrap();
        let text = &mut made[span.into_u64() as usize - 1];
        let mut fields = Fields(std::mem::take(text));
        values.record(&mut fields);
        *text = fields.0;
    }
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, span: &span::Id) {
        let name = self.made.lock().unwrap()[span.into_u64() as usize - 1].clone();
        self.entered.lock().unwrap().push(name);
    }
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn spans_say_what_a_call_did() {
    let spans: &'static Spans = Box::leak(Box::default());
    tracing::subscriber::with_default(spans, || {
        let source = Memory::with(&[Fake::sized(2, 2)]).source();
        let runtime = Runtime::over(source, Device::Cpu).unwrap();
        let model = runtime.load("fake").unwrap();
        model.run("f", &[x(2, 2)]).unwrap();
        model.run("f", &[x(1, 2)]).unwrap();
        model.run("f", &[x(3, 2)]).unwrap_err();
    });
    insta::assert_snapshot!(spans.made.lock().unwrap().join("\n"), @r#"
    weights
    load module="f"
    artifact
    run module="f" bucket="batch=2 seq=2" rung="exact"
    run module="f" bucket="batch=2 seq=2" rung="padded"
    pad module="f"
    run module="f"
    "#);
    assert_eq!(spans.entered.lock().unwrap().len(), 7);
}
