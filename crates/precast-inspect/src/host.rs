//! Whether this host can run programs of a target.

use serde::Serialize;

use precast_store::{
    Target,
    target::{Mismatch, host_features},
};

/// The result of comparing a target with this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// Every field that does not fit; empty if all compared fields do.
    pub mismatches: Vec<Mismatch>,
    /// Fields that were not compared, such as the version of torch.
    pub unknown: Vec<&'static str>,
}

/// Compares a target with this host. Nothing is loaded.
pub fn verdict(target: &Target) -> Verdict {
    let host = Target {
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        isa: "native".to_owned(),
        features: host_features(),
        // Unknown fields are taken from the target, so that they match.
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
