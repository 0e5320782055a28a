//! The check whether this host can run programs of a target.

use precast_store::{
    Target,
    target::{Mismatch, host_features},
};

/// Returns every field of a target that does not fit this host. Nothing is loaded: torch, and the GPU and its CUDA, are
/// not compared.
pub fn mismatches(target: &Target) -> Vec<Mismatch> {
    let host = Target {
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        isa: "native".to_owned(),
        features: host_features(),
        // Unknown fields are taken from the target, so that they match.
        ..target.clone()
    };
    target.mismatches(&host)
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
        assert_eq!(mismatches(&target), []);
        target.features.push("a-feature-nobody-has".into());
        target.os = "plan9".into();
        let fields: Vec<_> = mismatches(&target).iter().map(|m| m.field).collect();
        assert_eq!(fields, ["os", "isa"]);
    }
}
