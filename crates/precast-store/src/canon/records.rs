//! The canonical walk over parts of records.

use super::{Canon, Sink, record};
use crate::{
    Target,
    record::{Bounds, Constant, Dtype, Input, Layout, Pad},
    target::DeviceKind,
};

impl Canon for Target {
    fn walk(&self, sink: &mut dyn Sink) {
        let mut features = self.features.clone();
        features.sort();
        record(
            sink,
            &[
                ("os", &self.os),
                ("arch", &self.arch),
                ("isa", &self.isa),
                ("features", &features),
                ("device", &self.device),
                ("sm", &self.sm),
                ("torch", &self.torch),
                ("torch_git", &self.torch_git),
                ("cuda", &self.cuda),
                ("cxx11_abi", &self.cxx11_abi),
            ],
        );
    }
}

impl Canon for Input {
    fn walk(&self, sink: &mut dyn Sink) {
        record(
            sink,
            &[
                ("name", &self.name),
                ("dtype", &self.layout.dtype),
                ("shape", &self.layout.shape),
                ("stride", &self.layout.stride),
                ("dims", &self.dims),
                ("pad", &self.pad),
                ("range", &self.range.as_ref().map(|range| &range[..])),
            ],
        );
    }
}

impl Canon for Layout {
    fn walk(&self, sink: &mut dyn Sink) {
        let fields: &[(&str, &dyn Canon)] = &[
            ("dtype", &self.dtype),
            ("shape", &self.shape),
            ("stride", &self.stride),
        ];
        record(sink, fields);
    }
}

impl Canon for Constant {
    fn walk(&self, sink: &mut dyn Sink) {
        record(
            sink,
            &[
                ("name", &self.name),
                ("dtype", &self.layout.dtype),
                ("shape", &self.layout.shape),
                ("stride", &self.layout.stride),
            ],
        );
    }
}

impl Canon for Pad {
    fn walk(&self, sink: &mut dyn Sink) {
        match self {
            Self::Bool(value) => sink.boolean(*value),
            Self::Int(value) => sink.integer(*value),
            Self::Float(value) => sink.float(*value),
        }
    }
}

impl Canon for Bounds {
    fn walk(&self, sink: &mut dyn Sink) {
        [self.min, self.max][..].walk(sink);
    }
}

impl Canon for Dtype {
    fn walk(&self, sink: &mut dyn Sink) {
        let ordinal = match self {
            Self::Float32 => 0,
            Self::Float64 => 1,
            Self::Float16 => 2,
            Self::Bfloat16 => 3,
            Self::Int64 => 4,
            Self::Int32 => 5,
            Self::Int16 => 6,
            Self::Int8 => 7,
            Self::Uint8 => 8,
            Self::Bool => 9,
        };
        sink.word(ordinal, self.name());
    }
}

impl Canon for DeviceKind {
    fn walk(&self, sink: &mut dyn Sink) {
        match self {
            Self::Cpu => sink.word(0, "cpu"),
            Self::Cuda => sink.word(1, "cuda"),
        }
    }
}
