//! The spans and events that a `tracing` subscriber receives from the runtime.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

use tracing::{Metadata, span};

/// Keeps the names of the spans that this thread enters, and of which they are part.
#[derive(Default)]
pub struct Spans {
    pub made: Mutex<Vec<String>>,
    pub entered: Mutex<Vec<String>>,
    next: AtomicU64,
}

struct Fields(String);

impl tracing::field::Visit for Fields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if !["program", "device", "object", "digest", "bytes"].contains(&field.name()) {
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

/// Returns the spans that `work` makes on this thread.
pub fn spans(work: impl FnOnce()) -> &'static Spans {
    let spans: &'static Spans = Box::leak(Box::default());
    tracing::subscriber::with_default(spans, work);
    spans
}
