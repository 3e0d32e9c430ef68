// What schema.json is made of: Grafana's own types of dashboards, and of the options of the panels that ours use.
//   npm install --no-package-lock && npm run schema
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { Dashboard } from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen';

export interface Grafana {
  dashboard: Dashboard;
  options: { bargauge: Partial<bargauge.Options>; stat: Partial<stat.Options>; timeseries: Partial<timeseries.Options> };
  custom: { timeseries: Partial<timeseries.FieldConfig> };
}
