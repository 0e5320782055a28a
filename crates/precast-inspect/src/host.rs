//! Whether this host can run programs of a target.

use serde::Serialize;

use precast_store::{
    Target,
    target::{Mismatch, host_features},
};

/// What is known about running a target here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// Every reason why it can't; empty when nothing that was looked at speaks against it.
    pub mismatches: Vec<Mismatch>,
    /// Fields that could not be compared here, as the version of torch on a machine that has none.
    pub unknown: Vec<&'static str>,
}

/// Compares a target with this host: what this process can see of it without loading anything.
pub fn verdict(target: &Target) -> Verdict {
    let host = Target {
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        isa: "native".to_owned(),
        features: host_features(),
        // What is not known is taken to be as it should.
        ..target.clone()
    };
    let mut unknown = vec!["torch"];
    if target.sm.is_some() {
        unknown.extend(["sm", "cuda"]);
    }
    Verdict {
        mismatches: target.mismatches(&host),
        unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::testing;

    #[test]
    fn a_wrong_machine_is_named_and_this_one_runs_it() {
        let mut target = testing::target();
        target.arch = std::env::consts::ARCH.into();
        target.os = std::env::consts::OS.into();
        assert_eq!(verdict(&target).mismatches, []);
        target.features.push("a-feature-nobody-has".into());
        target.os = "plan9".into();
        let fields: Vec<_> = verdict(&target)
            .mismatches
            .iter()
            .map(|m| m.field)
            .collect();
        assert_eq!(fields, ["os", "isa"]);
    }
}
