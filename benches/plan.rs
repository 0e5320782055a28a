//! The time to find that nothing has to be built: the work of a warm `precast build` before it answers.
#![allow(clippy::unwrap_used, reason = "a benchmark panics where it fails")]

use std::{collections::BTreeMap, fs, hint::black_box, path::Path};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use precast_builder::{
    plan::{self, Common, PlanRequest, RequestKey, forms},
    spec::{Overrides, Spec},
};
use precast_store::{
    Digest, Store, Target,
    record::{Entry, Package, Padding, Program, Release, SCHEMA, SourceFile},
};
use serde_json::json;

const SOURCES: usize = 40;

/// Writes a project of one module with `programs` buckets and a store that has all of them.
fn built(folder: &Path, programs: usize) -> (Spec, Store) {
    let site = folder.join("site-packages");
    fs::create_dir_all(site.join("torch")).unwrap();
    fs::create_dir_all(site.join("numpy-2.0.dist-info")).unwrap();
    let version = "__version__ = '2.11.0+cu130'\ngit_version = 'f'\ncuda = '13.0'\n";
    fs::write(site.join("torch/version.py"), version).unwrap();
    let sources = (0..SOURCES).map(|number| {
        let path = format!("layer_{number}.py");
        let text = format!("WIDTH = {number}\n").repeat(400);
        fs::write(folder.join(&path), &text).unwrap();
        SourceFile {
            path,
            digest: Digest::of(text.as_bytes()),
        }
    });
    let entry = Entry {
        entry: "model:load".into(),
        sources: sources.collect(),
        packages: vec![Package {
            name: "numpy".into(),
            version: "2.0".into(),
        }],
        declared: BTreeMap::new(),
        site_packages: vec![site.to_string_lossy().into_owned()],
    };
    let sizes: Vec<String> = (1..=programs).map(|size| size.to_string()).collect();
    let text = format!(
        "schema = 1\nmodel = {{ name = \"bench\", entry = \"model:load\" }}\n[[module]]\nname = \"encode\"\n\
         [module.inputs]\nids = {{ dtype = \"int64\", shape = [\"batch\", 128] }}\n\
         mask = {{ dtype = \"int64\", shape = [\"batch\", 128] }}\n[module.buckets]\nbatch = [{}]\n",
        sizes.join(",")
    );
    let file = folder.join("precast.toml");
    fs::write(&file, text).unwrap();
    let spec = Spec::load(&file).unwrap();
    let store = Store::create(folder.join("artifacts")).unwrap();

    let target = Target::of_host(spec.target.device, &spec.target.isa, &[site]).unwrap();
    let common = Common {
        model: &spec.model.name,
        entry: &spec.model.entry,
        samples: None,
        context: None,
        unsaved: &[],
        weights_file: false,
        sources: &entry.sources,
        packages: &entry.packages,
        target: &target,
    };
    let common = common.shared();
    let module = &spec.modules[0];
    let settings = spec.settings(module, &Overrides::default(), &Overrides::default());
    let mut ids = Vec::new();
    for form in forms(module, &settings.compile) {
        let inputs = module.sized_inputs(&form.sizes);
        let key = RequestKey {
            common: &common,
            module: &module.name,
            path: &module.path,
            method: &module.method,
            inputs: inputs.as_deref(),
            train: module.train.as_ref(),
            pair: module.pair.as_ref(),
            state: &module.sized_state(&form.sizes, &spec.modules),
            sizes: &form.sizes,
            dynamic: form.dynamic.as_ref(),
            compiled: form.compiled,
            regions: &module.regions,
            settings: &settings.compile,
            padding: Default::default(),
            tuned: false,
        };
        let (id, request) = key.explained();
        let program = Program {
            schema: SCHEMA,
            id,
            model: spec.model.name.clone(),
            module: module.name.clone(),
            sizes: form.sizes.clone(),
            dynamic: form.dynamic.clone(),
            target: target.clone(),
            inputs: inputs.unwrap_or_default(),
            states: vec![],
            outputs: vec![],
            results: vec![],
            checks: vec![],
            values: 2,
            steps: vec![],
            eager: None,
            constants: None,
            padding: Padding::Allowed,
            train: None,
            call_spec: json!(null),
            request,
            receipt: Default::default(),
            provenance: Default::default(),
        };
        ids.push(store.records().put_program(&program).unwrap().id);
    }
    let release = Release {
        schema: SCHEMA,
        model: spec.model.name.clone(),
        seq: 0,
        name: None,
        rollback: None,
        programs: ids,
        lacks: vec![],
        shims: vec![],
        weights: None,
        aliases: BTreeMap::new(),
        assets: BTreeMap::new(),
        entry,
        provenance: Default::default(),
    };
    store.releases().put(&release).unwrap();
    (spec, store)
}

fn warm(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("warm plan");
    group.sample_size(20);
    for programs in [100, 1_000, 10_000] {
        let folder = tempfile::tempdir().unwrap();
        let (spec, store) = built(folder.path(), programs);
        let file = spec.file.clone();
        group.throughput(Throughput::Elements(programs as u64));
        group.bench_function(BenchmarkId::from_parameter(programs), |bencher| {
            bencher.iter(|| {
                let spec = Spec::load(&file).unwrap();
                let known = plan::known(&spec, &store, None).unwrap();
                let plan = plan::plan(&spec, Some(&store), known, &PlanRequest::default()).unwrap();
                // The module has an eager program too.
                assert_eq!(
                    (plan.missing().count(), plan.items.len()),
                    (0, programs + 1)
                );
                black_box(plan)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, warm);
criterion_main!(benches);
